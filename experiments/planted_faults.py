"""Plants a fault in a copy of the source for each claim of docs/faults.md, and shows that its check finds it.

    python -m experiments.planted_faults                     every fault; about a minute for each of vLLM's
    python -m experiments.planted_faults --only tenants      faults whose name contains this word
    python -m experiments.planted_faults --list

A check is a test that docs/faults.md names (`core/test_hints.py::test_…`), or `fuzzing: PARSER`. A fault
replaces one piece of text in one file. The exit status is 1 if a check did not find its fault: such a check
cannot fail. Checks on a real server are skipped unless TENUTO_TEST_MODEL is set.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tenuto"
LIMIT_S = 900.0
FUZZING = "fuzzing: "
NUM_INPUTS = 300


@dataclass(frozen=True)
class Fault:
    """A replacement of one piece of text in one file, and the checks that must find it."""

    name: str
    file: str
    """Below src/tenuto."""
    text: str
    """Must occur exactly once."""
    replacement: str
    checks: tuple[str, ...]


FAULTS = (
    # Clients.
    Fault(
        "tenants: any signature is taken",
        "vllm/tenants.py",
        "return tenant if is_valid else None",
        "return tenant",
        (
            "vllm/test_tenants.py::test_what_a_client_says_is_not_believed",
            "vllm/test_control.py::test_a_client_ends_its_own_job_only",
            "fuzzing: hints",
            "fuzzing: control",
        ),
    ),
    Fault(
        "tenants: a request does not carry its tenant",
        "vllm/middleware.py",
        'with tenants.carry(self._tenants.get(get_headers(scope), scope.get("headers", ()))):',
        "with tenants.carry(None):",
        (
            "vllm/test_tenants.py::test_neither_the_path_nor_the_form_of_a_body_hides_the_tenant",
            "vllm/test_server_tenants.py::test_no_path_and_no_body_leads_out_of_the_tenant",
            "fuzzing: bodies",
        ),
    ),
    Fault(
        "tenants: the client's own header counts beside the proxy's",
        "vllm/tenants.py",
        "if name.lower() == counting}) > 1:",
        "if name.lower() == counting}) > 2:",
        ("vllm/test_tenants.py::test_a_tenant_that_a_client_names_beside_its_proxy_is_not_believed",),
    ),
    Fault(
        "tenants: what is not verified counts as everybody's",
        "vllm/tenants.py",
        'nothing: {_UNVERIFIED_REASON}")\n            return None',
        'nothing: {_UNVERIFIED_REASON}")\n            return {}',
        ("vllm/test_server_tenants.py::test_who_has_no_valid_key_keeps_nothing",),
    ),
    Fault(
        "tenants: what is not verified weighs as much as a tenant",
        "core/fairness.py",
        "UNVERIFIED_WEIGHT = 0.1",
        "UNVERIFIED_WEIGHT = 1.0",
        (
            "vllm/test_tenants.py::test_requests_that_cannot_be_verified_share_one_small_weight_and_keep_nothing",
        ),
    ),
    Fault(
        "tenants: a server without a secret starts",
        "vllm/tenants.py",
        "if self._has_tenants and (problem := find_secret_problem()):",
        "if False and (problem := find_secret_problem()):",
        (
            "vllm/test_tenants.py::test_a_server_with_tenants_and_without_a_secret_does_not_start",
            "vllm/test_server_tenants.py::test_a_server_with_keys_and_without_the_plug_in_does_not_start",
        ),
    ),
    Fault(
        "tenants: keys in a file are not seen",
        "vllm/tenants.py",
        'if name == "--config"]',
        "if False]",
        (
            "vllm/test_tenants.py::test_a_server_with_tenants_and_without_a_secret_does_not_start",
            "vllm/test_server_tenants.py::test_a_server_with_keys_and_without_the_plug_in_does_not_start",
        ),
    ),
    Fault(
        "tenants: a client's own word chooses the rank",
        "vllm/middleware.py",
        "if self._tenants.has_tenants else xargs",
        "if tenants.get_carried() else xargs",
        ("vllm/test_tenants.py::test_one_job_s_turns_keep_to_the_rank_of_the_tenant_s_job",),
    ),
    Fault(
        "tenants: an engine with another secret is served",
        "vllm/middleware.py",
        'return "; ".join(each for each in wrong if not each.endswith(STOCK)) or None',
        "return None",
        ("vllm/test_tenants.py::test_an_api_server_whose_engines_cannot_verify_tenants_does_not_start",),
    ),
    Fault(
        "tenants: a key's name is computed without the secret",
        "vllm/tenants.py",
        '_make_digest("name", key, get_secret() or "")',
        '_make_digest("name", key, "")',
        ("vllm/test_tenants.py::test_a_key_that_was_checked_names_the_tenant_without_telling_the_key",),
    ),
    Fault(
        "tenants: any key makes some where there are none",
        "vllm/tenants.py",
        "if not self.has_tenants:\n            return None",
        "if not self.has_tenants and False:\n            return None",
        (
            "vllm/test_tenants.py::test_where_no_key_is_checked_a_key_says_nothing",
            "vllm/test_control_http.py::test_no_key_makes_a_server_without_keys_one_with_tenants",
        ),
    ),
    Fault(
        "tenants: a hidden check of keys is none",
        "vllm/tenants.py",
        "if self._check_key is not None or not has_key_check(scope):",
        "if True:",
        ("vllm/test_tenants.py::test_a_server_whose_check_of_keys_is_hidden_does_not_start",),
    ),
    Fault(
        "jobs: a request id of any length is remembered",
        "core/jobs.py",
        "{get_bounded_id(turn_id)}",
        "{turn_id}",
        ("core/test_conversation.py::test_a_turn_s_own_name_is_short_however_long_an_id_its_client_chose",),
    ),
    Fault(
        "tenants: /metrics names them",
        "core/exported_metrics.py",
        "return tenant in OWN_NAMES or (shows_names and",
        "return tenant in OWN_NAMES or (True and",
        ("vllm/test_server_tenants.py::test_no_page_names_a_tenant_unless_it_is_set",),
    ),
    Fault(
        "tenants: /metrics mixes up what has one name",
        "core/exported_metrics.py",
        "(shows_names and tenant not in (NO_TENANT, OTHER_TENANTS))",
        "shows_names",
        (
            "dashboards/test_alert_metrics.py::"
            "test_a_tenant_named_like_a_label_of_tenuto_s_counts_among_the_others",
        ),
    ),
    Fault(
        "tenants: ids are everybody's",
        "core/requests.py",
        'job_id = None if job_id is None else f"{tenant}\\t{job_id}"',
        "pass",
        ("vllm/test_tenants.py::test_who_knows_an_id_has_a_job_of_his_own",),
    ),
    Fault(
        "tenants: a client sees hits on what others computed again",
        "core/control.py",
        'hidden = ("reused_tokens", "short_tokens", "ledger")',
        'hidden = ("short_tokens", "ledger")',
        ("vllm/test_control_http.py::test_a_client_cannot_tell_what_other_tenants_have_in_the_cache",),
    ),
    Fault(
        "tenants: a client sees hits on what others computed",
        "vllm/control_http.py",
        "sees_all = is_operator or not self._tenants.has_tenants",
        "sees_all = True",
        ("vllm/test_control_http.py::test_a_client_cannot_tell_what_other_tenants_have_in_the_cache",),
    ),
    Fault(
        "tenants: a client in shadow mode sees hits on what others computed again",
        "core/driver.py",
        "if not self.is_shadow:\n            turn.job.num_kept_tokens",
        "if True:\n            turn.job.num_kept_tokens",
        ("vllm/test_control_http.py::test_a_client_in_shadow_mode_cannot_tell_what_others_computed_again",),
    ),
    Fault(
        "jobs: a tool's time is learned again from each turn that is given up",
        "core/driver.py",
        "job.paused_s = None",
        "pass",
        (
            "core/test_driver_jobs.py::"
            "test_a_tool_s_time_is_told_once_even_if_the_client_gives_up_and_asks_again",
        ),
    ),
    Fault(
        "copies: known by how their ids begin",
        "vllm/compat/offload.py",
        "ended = self._loads.keys() & (output.finished_recving or set())",
        'ended = {each for each in output.finished_recving or () if "tenuto-" in each}',
        (
            "vllm/test_tiers.py::test_a_request_is_not_taken_for_a_copy_by_its_name",
            "vllm/test_server.py::test_names_of_tenuto_s_own_copies_are_answered",
        ),
    ),
    Fault(
        "copies: fetched where nothing is cached",
        "vllm/compat/offload.py",
        "self.is_plain and self._pool.enable_caching and not",
        "self.is_plain and not",
        ("vllm/test_tiers.py::test_without_a_prefix_cache_nothing_is_fetched",),
    ),
    Fault(
        "transfers: what a client says is taken for an object",
        "records/codec.py",
        "each.values() if type(each) is dict else each for",
        "each.values() for",
        ("vllm/test_server.py::test_what_a_client_says_of_transfers_ends_nothing",),
    ),
    Fault(
        "requests: fields of any depth go on to the workers",
        "vllm/scheduler.py",
        "        drop_deep_fields(request, self._deep_fields)\n",
        "",
        (
            "vllm/test_attacks.py::"
            "test_what_is_nested_too_deeply_to_pickle_is_dropped_before_it_reaches_workers",
            "vllm/test_attacks.py::test_later_parts_of_a_streamed_in_prompt_are_not_nested_too_deeply_either",
        ),
    ),
    Fault(
        "requests: an id goes into the log as its client wrote it",
        "vllm/requests.py",
        "name = get_bounded_id(request.request_id)",
        "name = request.request_id",
        ("vllm/test_attacks.py::test_a_client_writes_no_lines_of_its_own_into_the_log",),
    ),
    Fault(
        "routers: an id that a client can write for a job without one",
        "core/dispatcher.py",
        'return f"\\tunnamed-{self._num_unnamed}"',
        'return f"unnamed-{self._num_unnamed}"',
        ("core/test_dispatcher.py::test_a_job_that_nobody_names_has_an_id_that_nobody_can_name",),
    ),
    Fault(
        "bodies: read before vLLM checks the key",
        "vllm/middleware.py",
        "receive = self._read_when_asked(scope, receive, found)",
        "receive = self._read_when_asked(scope, receive, found)\n            await receive()",
        ("vllm/test_identity_key.py::test_without_a_valid_key_nothing_is_read_or_parsed",),
    ),
    Fault(
        "bodies: what is no JSON raises",
        "vllm/middleware.py",
        "except (ValueError, RecursionError):\n        return None",
        "except RecursionError:\n        return None",
        ("vllm/test_identity_passthrough.py::test_any_bytes", "fuzzing: bodies"),
    ),
    Fault(
        "bodies: any size is held in memory",
        "vllm/control_http.py",
        'if message["type"] != "http.request" or len(body) + len(part) > most_bytes:',
        'if message["type"] != "http.request":',
        ("vllm/test_identity_passthrough.py::test_a_large_body_streams_through",),
    ),
    Fault(
        "hints: a year",
        "core/requests.py",
        "return min(seconds, MAX_EXPECTED_TOOL_S)",
        "return seconds",
        ("core/test_hints.py::test_how_long_the_tool_will_take", "core/test_hints.py", "fuzzing: hints"),
    ),
    Fault(
        "wishes: a year",
        "core/wish_dialects.py",
        "key = min(keep_s, MAX_KEEP_S), type(end)",
        "key = keep_s, type(end)",
        ("sim_server/test_wishes.py",),
    ),
    Fault(
        "wishes: what makes no sense is not counted",
        "core/wish_dialects.py",
        "is_malformed = True",
        "pass",
        ("core/test_wishes.py",),
    ),
    Fault(
        "clients: an idle engine keeps a lease that is over",
        "vllm/scheduler.py",
        "if any(each is not None and each <= now_s for each in dues):\n            return True",
        "if False:\n            return True",
        ("vllm/test_leases.py::test_expiry_while_idle_takes_one_step",),
    ),
    Fault(
        "clients: blocks of a lease leak",
        "core/leases.py",
        "        self._engine.release(tail)",
        "        pass",
        (
            "vllm/test_leases.py::test_chaos_ends_clean",
            "vllm/test_faults.py::test_a_lease_on_blocks_that_a_connector_could_not_load_ends",
        ),
    ),
    Fault(
        "clients: nothing bounds waits",
        "core/limits.py",
        '        """Check the weights. Raises ConfigError naming the tenant."""\n',
        '        object.__setattr__(self, "max_wait_over_stock", None)\n'
        '        object.__setattr__(self, "max_parallel_turns", 10**6)\n',
        (
            "vllm/test_attacks.py::test_one_id_for_a_flood_of_requests_does_not_keep_others_waiting",
            "vllm/test_attacks.py::test_old_ids_kept_busy_do_not_keep_others_waiting",
        ),
    ),
    Fault(
        "clients: no service is counted",
        "core/fairness.py",
        "own.time += due / own.weight",
        "own.time += 0.0",
        ("core/test_fair_order.py::test_a_flood_does_not_push_another_tenant_back",),
    ),
    Fault(
        "clients: an aborted request moves where other tenants start",
        "core/fairness.py",
        "].begin = own.get_time(self._get_priority(turn))\n",
        "].begin = self._now[0] = own.get_time(self._get_priority(turn))\n",
        ("core/test_fair_order.py::test_a_turn_that_is_aborted_sends_no_other_tenant_back",),
    ),
    Fault(
        "clients: a prompt that kept all others waiting counts for nothing if it is aborted",
        "core/fairness.py",
        "self._charges[turn_id].has_blocked = True",
        "self._charges[turn_id].has_blocked = False",
        (
            "core/test_fair_order.py::test_a_turn_that_kept_all_others_waiting_counts_even_if_it_is_aborted",
            "vllm/test_attacks.py::test_prompts_that_never_fit_in_time_keep_nobody_waiting_again_and_again",
        ),
    ),
    Fault(
        "clients: one turn that waits keeps its tenant's place before all others",
        "core/fairness.py",
        "if now > self.get_time(priority):",
        "if now > self.get_time(priority) and not self.num_waiting:",
        (
            "core/test_fair_order.py::test_a_turn_that_waits_behind_urgent_ones_keeps_no_place_among_these",
            "core/test_fair_order.py::test_a_turn_that_cannot_start_yet_earns_no_credit",
        ),
    ),
    Fault(
        "clients: all of an answer's last tokens is read, however long they are",
        "vllm/requests.py",
        "[-MAX_TAIL_CHARS:]",
        "",
        ("vllm/test_attacks.py::test_the_end_of_an_output_of_very_long_tokens_is_read_in_part",),
    ),
    Fault(
        "record: each request under way has room of its own",
        "proxy/proxy.py",
        ", room=self._room)",
        ")",
        ("proxy/test_recording.py::test_requests_under_way_share_the_room_for_their_bodies",),
    ),
    Fault(
        "record: a body of any number of values is parsed",
        "proxy/exchange.py",
        'data.count(b",") > MAX_COMMAS',
        "False",
        ("proxy/test_recording.py::test_a_body_of_millions_of_values_passes_and_is_not_parsed",),
    ),
    Fault(
        "record: a model's name may be any text",
        "proxy/exchange.py",
        " and len(model) <= MAX_MODEL_CHARS else",
        " else",
        ("proxy/test_recording.py::test_a_text_in_the_place_of_the_model_s_name_is_not_written_down",),
    ),
    Fault(
        "wishes: they may keep any part of the cache",
        "core/leases.py",
        "MAX_WISHED_SHARE = 0.25",
        "MAX_WISHED_SHARE = 1.0",
        ("core/test_wished_leases.py::test_leases_that_only_wishes_keep_cover_a_quarter_of_the_cache",),
    ),
    Fault(
        "wishes: what a policy gives up does not count among them",
        "core/leases.py",
        "if (yield from self._make_room(lease, now_s)):",
        "if False:",
        ("core/test_wished_leases.py::test_so_do_those_that_a_policy_has_given_up_meanwhile",),
    ),
    Fault(
        "wishes: a tenant with many takes those of others",
        "core/leases.py",
        "tenant=tenant if is_over else None)",
        "tenant=None)",
        ("core/test_wished_leases.py::test_a_tenant_s_many_wishes_take_nothing_from_another_s",),
    ),
    Fault(
        "trace: names may have any letters",
        "records/trace.py",
        "MAX_NAME_CHARS // 4",
        "MAX_NAME_CHARS * 4",
        (
            "vllm/test_scheduler.py::test_the_names_of_leases_and_of_waiting_requests_make_no_step_s_record_long",
        ),
    ),
    Fault(
        "clients: the text behind each marker of a tool call is read",
        "core/tool_calls.py",
        "if num_left <= 0:",
        "if num_left is None:",
        ("core/test_tool_calls.py::test_a_text_with_every_opening_marker_is_not_read_from_each_of_them",),
    ),
    Fault(
        "clients: any number of JSON values in a row is read",
        "core/tool_calls.py",
        "for _ in range(_MAX_VALUES):",
        "while True:",
        ("core/test_tool_calls.py::test_values_in_a_row_are_read_up_to_a_number_of_them",),
    ),
    Fault(
        "clients: any number of stop strings is searched for",
        "vllm/requests.py",
        "params.stop[:MAX_STOPS]",
        "params.stop",
        ("vllm/test_attacks.py::test_an_answer_is_searched_for_some_of_a_million_stop_strings",),
    ),
    Fault(
        "clients: a conversation's name names a job whatever the content",
        "vllm/requests.py",
        'is_conversation_id(hints.name or "")',
        "False",
        ("vllm/test_attacks.py::test_a_job_id_that_is_a_conversation_s_name_takes_nobody_s_lease",),
    ),
    Fault(
        "clients: any number of values in `vllm_xargs` is written again",
        "vllm/middleware.py",
        'if _holds_many(request.get("vllm_xargs")):',
        "if False:",
        ("vllm/test_identity_passthrough.py::test_xargs_of_very_many_values_pass_as_they_are",),
    ),
    Fault(
        "clients: a user id of any length is parsed",
        "core/requests.py",
        " or len(user_id) > _MAX_USER_ID_CHARS:",
        ":",
        ("vllm/test_identity.py::test_a_user_is_no_job",),
    ),
    Fault(
        "clients: a wish's place is looked for in a text of any length",
        "core/wishes.py",
        "if len(text) > self.MAX_WINDOW_CHARS:",
        "if not text:",
        ("core/test_wishes.py::test_a_text_of_very_long_tokens_is_read_once",),
    ),
    Fault(
        "clients: a prompt is compared with all jobs that share a part of it",
        "core/jobs.py",
        "if num_tried > MAX_TRIED:",
        "if num_tried < 0:",
        ("core/test_lineage.py::test_jobs_that_end_at_each_block_of_a_text_make_no_other_prompt_slow",),
    ),
    Fault(
        "clients: cheap requests change what is known of agents",
        "estimators/returns.py",
        "PRIOR_TOKENS = 100_000.0",
        "PRIOR_TOKENS = 1.0",
        ("policies/test_tenuto_attacks.py::test_cheap_requests_with_fresh_ids_take_no_lease_from_agents",),
    ),
    Fault(
        "clients: two turns of a job each get a lease",
        "core/leases.py",
        "if old is not None and not is_claimed:",
        "if False:",
        ("vllm/test_attacks.py::test_parallel_turns_of_a_few_ids_in_every_order",),
    ),
    Fault(
        "clients: any answer without a call ends its job",
        "core/driver.py",
        "if view.tool is not None and job.live_turn_ids and not finish.aborted:",
        "if False:",
        ("core/test_driver_jobs.py::test_an_answer_without_a_call_does_not_end_the_job_of_its_siblings",),
    ),
    Fault(
        "clients: a lease is not compared with the prompt",
        "core/leases.py",
        "num_common = self._engine.count_common_tokens(lease.blocks, turn.arrival.hashes)",
        "num_common = 10**9",
        ("vllm/test_leases.py::test_a_rewritten_prompt_supersedes_the_lease",),
    ),
    Fault(
        "clients: no shell tool is known",
        "core/tool_calls.py",
        '_SHELL_NAMES = ("bash", "shell", "terminal", "command", "cmd", "exec")',
        '_SHELL_NAMES = ("none",)',
        ("core/test_tool_calls.py",),
    ),
    Fault(
        "verify: whatever became of the lease is the memory of others",
        "client/verify.py",
        '    return "not held"\n',
        '    return "yielded"\n',
        ("client/test_verify.py::test_memory_that_others_take_neither_fails_the_check_nor_passes_it",),
    ),
    Fault(
        "verify: all leased blocks are this job's",
        "client/verify.py",
        'jobs/{self._job_id}/release")\n        return self._read_job().num_leased_blocks',
        'jobs/{self._job_id}/release")\n        page = self.engines[0].get("/metrics").text\n'
        '        return int(float(page.split("tenuto:retained_blocks{")[1].split()[1]))',
        ("sim_server/test_server.py::test_verify_looks_at_its_own_job_only",),
    ),
    Fault(
        "jobs: a routing key names one",
        "core/requests.py",
        'request.get("session_id"),  # reached only',
        'request.get("prompt_cache_key"),\n        request.get("session_id"),  # reached only',
        (
            "sim_server/test_identity.py::test_agents_that_share_a_routing_key_keep_their_own_leases",
            "vllm/test_server.py::test_agents_that_share_a_routing_key_keep_their_own_leases",
        ),
    ),
    # Engine and memory.
    Fault(
        "memory: leases do not yield",
        "core/leases.py",
        "            while num_freed < num_blocks:\n                chosen",
        "            while False:\n                chosen",
        ("vllm/test_leases.py::test_leases_never_delay_or_preempt_others",),
    ),
    Fault(
        "memory: a step's blocks are counted in blocks of the first layer group",
        "vllm/compat/scheduler.py",
        "min(each.block_size for each in self._manager.coordinator.single_type_managers)",
        "get_block_size(scheduler)",
        ("vllm/test_hybrid_leases.py::test_leases_yield_to_a_prompt_that_needs_many_small_blocks",),
    ),
    Fault(
        "memory: a reset leaves leases",
        "vllm/scheduler.py",
        "        self.driver.drop_all(time.monotonic())\n        if self.tier is not None:",
        "        if self.tier is not None:",
        ("vllm/test_leases.py::test_reset_of_the_prefix_cache_drops_leases",),
    ),
    Fault(
        "memory: leases end before their time only",
        "core/leases.py",
        "if first is None or self._deadlines.get_key(first)[0] > now_s:",
        "if first is None or self._deadlines.get_key(first)[0] < now_s:",
        ("vllm/test_faults.py::test_a_clock_that_stands_still_or_jumps_stalls_nothing",),
    ),
    Fault(
        "memory: the next deadline is a duration",
        "vllm/metrics.py",
        "lambda at_s: time.time() + at_s - now_s",
        "lambda at_s: at_s - now_s",
        ("vllm/test_metrics.py::test_the_next_deadline_is_a_moment_in_unix_time",),
    ),
    Fault(
        "memory: vLLM's names are not looked up",
        "vllm/compat/check.py",
        'problems.append(f"{path} is missing")',
        "pass",
        ("vllm/test_scheduler.py::test_a_missing_or_changed_name_stops_the_start",),
    ),
    Fault(
        "memory: on_mismatch is ignored",
        "vllm/scheduler.py",
        'if settings.on_mismatch == "stop":',
        "if True:",
        ("vllm/test_scheduler.py::test_when_told_to_a_vllm_that_does_not_fit_runs_stock",),
    ),
    # Policies.
    Fault(
        "policies: a hook that raises stops the engine",
        "core/policy_caller.py",
        "            answer = getattr(self._stock, hook)(*inputs)\n",
        "            raise\n",
        ("vllm/test_scheduler.py::test_a_faulty_policy_costs_only_itself",),
    ),
    Fault(
        "policies: NaN is a key",
        "core/policy_caller.py",
        "if not isinstance(part, _KEY_PARTS) or part != part:",
        "if not isinstance(part, _KEY_PARTS):",
        ("core/test_asking.py::test_a_key_that_is_none_is_replaced_by_stock_s",),
    ),
    Fault(
        "policies: terms of a wrong type",
        "core/types.py",
        'raise TypeError(f"yields must be a Yields, got {self}")',
        "pass",
        ("vllm/test_scheduler.py::test_terms_of_the_wrong_type_are_the_policys_fault",),
    ),
    Fault(
        "policies: their time is not counted",
        "vllm/scheduler.py",
        "(request.request_id)\n        driver.stats.decision_s",
        "(request.request_id)\n        started_s = time.perf_counter()\n        driver.stats.decision_s",
        ("vllm/test_faults.py::test_a_slow_policy_is_waited_for_and_shows_in_the_time_of_decisions",),
    ),
    Fault(
        "policies: a step renews all leases",
        "vllm/hooks.py",
        "MAX_DUE = 32",
        "MAX_DUE = 10**9",
        (
            "vllm/test_attacks.py::test_a_thousand_leases_due_at_once_are_looked_at_a_few_a_step",
            "vllm/test_attacks.py::test_a_hundred_leases_that_end_at_one_time_end_a_few_a_step",
        ),
    ),
    Fault(
        "policies: long queues are ordered at each tick",
        "vllm/hooks.py",
        "MAX_ORDERING_SHARE = 0.02",
        "MAX_ORDERING_SHARE = 1e9",
        ("vllm/test_attacks.py::test_a_long_queue_is_ordered_anew_less_often",),
    ),
    Fault(
        "policies: requests that a step skips are asked for their keys again",
        "vllm/waiting.py",
        "self._make_ready(request.request_id, self._popped.pop(request.request_id, None))",
        "self._make_ready(request.request_id)",
        ("vllm/test_attacks.py::test_requests_that_cannot_start_yet_keep_their_keys",),
    ),
    Fault(
        "leases: in large steps they give nothing back",
        "vllm/compat/scheduler.py",
        " or takes_prefixes or num_free_blocks < bound",
        " or num_free_blocks < bound",
        ("vllm/test_leases.py::test_leases_do_not_delay_requests_that_hit_long_free_prefixes",),
    ),
    Fault(
        "leases: all end for a request that does not fit, if nothing runs",
        "vllm/hooks.py",
        "can_help = missing <= len(leased)",
        "can_help = True",
        (
            "vllm/test_leases.py::"
            "test_a_request_that_does_not_fit_beside_one_that_waits_for_input_costs_no_lease",
        ),
    ),
    Fault(
        "policies: after a step that failed, no step is told",
        "vllm/hooks.py",
        "if all(each.output is not output for each in self._scheduled):",
        "if not self._scheduled or self._scheduled[0].output is not output:",
        ("vllm/test_time.py::test_steps_that_failed_do_not_hide_those_after_them",),
    ),
    Fault(
        "policies: admission is not asked",
        "core/waiting.py",
        "is_idle = idle and",
        "is_idle = True or",
        ("vllm/test_scheduler.py::test_admission_holds_new_jobs_back_and_never_idles",),
    ),
    Fault(
        "policies: a turn that waits for its grammar holds others back",
        "core/waiting.py",
        "<= self._num_skipped",
        "<= 0",
        ("vllm/test_attacks.py::test_a_turn_that_waits_for_its_grammar_holds_nobody_back",),
    ),
    Fault(
        "control: unknown settings are taken",
        "core/control.py",
        "unknown = sorted(set(change) - set(CHANGEABLE))",
        "unknown: list[str] = []",
        ("vllm/test_control.py::test_a_bad_change_is_refused_and_the_old_policy_goes_on",),
    ),
    Fault(
        "control: a change is applied although a rank refuses it",
        "vllm/control_http.py",
        'if status != 200:\n            return status, {**answer, "applied": False}',
        'if status == 999:\n            return status, {**answer, "applied": False}',
        ("vllm/test_control_http.py::test_a_change_that_one_rank_refuses_is_applied_on_none",),
    ),
    Fault(
        "control: requests that wait are lost in a change",
        "vllm/hooks.py",
        "                scheduler.waiting.add_request(request)\n",
        "                pass\n",
        ("vllm/test_control.py::test_switching_anything_under_load_loses_no_request_and_no_block",),
    ),
    Fault(
        "control: two operators at once",
        "core/control.py",
        "if after.get(str(self._rank), self._number) != self._number:",
        "if False:",
        ("vllm/test_control_http.py::test_two_operators_at_the_same_time_leave_all_ranks_alike",),
    ),
    Fault(
        "control: a change overtakes another",
        "vllm/control_http.py",
        "if len(set(numbers.values())) > 1 and",
        "if False and",
        ("vllm/test_control_http.py::test_no_change_overtakes_one_that_has_reached_the_first_rank_only",),
    ),
    Fault(
        "control: any scheme",
        "core/control.py",
        'if scheme.lower() == "bearer" and is_same:',
        "if is_same:",
        ("vllm/test_control_http.py::test_only_the_operator_s_key_opens_control", "fuzzing: control"),
    ),
    Fault(
        "control: an empty operator's key",
        "core/control.py",
        "    if not key:\n",
        "    if False:\n",
        ("fuzzing: control",),
    ),
    Fault(
        "control: a client's own word says whose a job is",
        "core/control.py",
        "parse_hints(self._read_fields(fields)).job_id",
        "parse_hints(fields).job_id",
        ("vllm/test_control_http.py::test_a_client_sees_what_is_held_for_its_own_job_and_why_nothing_is",),
    ),
    # Files.
    Fault(
        "files: unknown settings are ignored",
        "core/settings.py",
        'raise ConfigError(f"{where}: unknown key {key!r}; known keys: {known}{near}")',
        "continue",
        ("vllm/test_scheduler.py::test_bad_settings_are_refused_at_start",),
    ),
    Fault(
        "files: what cannot be written is not found before the start",
        "vllm/launch.py",
        'raise ConfigError(f"tenuto.{name}: cannot write {path!r}: {error}") from error',
        "pass",
        ("cli/test_cli.py::test_a_file_that_cannot_be_written_is_found_before_vllm_starts",),
    ),
    Fault(
        "files: the place of the state is not looked at",
        "vllm/state.py",
        "if self._path.is_dir() or not os.access(self._path.parent, os.W_OK):",
        "if False:",
        ("vllm/test_state.py::test_a_place_that_cannot_be_written_to_stops_the_server_at_start",),
    ),
    Fault(
        "files: a full disk stops the engine, by the trace",
        "records/trace.py",
        "            self._file.flush()\n        except OSError as error:",
        "            self._file.flush()\n        except MemoryError as error:",
        ("vllm/test_scheduler.py::test_a_full_disk_ends_the_trace_and_not_the_engine",),
    ),
    Fault(
        "files: what a policy learned is written whatever it is",
        "core/loader.py",
        "        json.dumps(state)\n",
        "",
        ("records/test_trace_file.py::test_what_a_policy_learned_is_left_out_of_headers_if_it_is_no_json",),
    ),
    Fault(
        "files: a failure of the state is told once for ever",
        "vllm/state.py",
        "            self._has_failed = False\n        except",
        "        except",
        ("vllm/test_state_file.py::test_a_disk_that_fails_is_reported_once_and_then_again_after_it_worked",),
    ),
    Fault(
        "files: metrics stand still after a full disk",
        "vllm/metrics.py",
        " or self._has_failed or any(",
        " or any(",
        ("vllm/test_metrics.py::test_metrics_go_on_after_a_full_disk",),
    ),
    Fault(
        "files: without room for the metrics the engine ends",
        "vllm/metrics.py",
        "except OSError as error:\n            # A failure to write",
        "except MemoryError as error:\n            # A failure to write",
        ("vllm/test_metrics.py::test_metrics_go_on_after_a_full_disk",),
    ),
    Fault(
        "files: the metrics' folder is not made again",
        "vllm/metrics.py",
        "file.parent.mkdir(mode=0o700, exist_ok=True)",
        "pass",
        ("vllm/test_faults.py::test_a_metrics_folder_that_is_removed_is_made_again",),
    ),
    Fault(
        "files: the state is written over the old one",
        "vllm/state.py",
        "open(partial,",
        "open(path,",
        ("vllm/test_state_file.py::test_a_crash_while_saving_leaves_the_old_file",),
    ),
    Fault(
        "files: the state is written through a link",
        "vllm/state.py",
        'open(partial, "x",',
        'open(path, "w",',
        ("vllm/test_state_file.py::test_a_link_that_another_user_put_there_is_not_written_through",),
    ),
    Fault(
        "files: a damaged state is not set aside",
        "vllm/state.py",
        "                self._path.replace(aside)",
        "                pass",
        ("vllm/test_state_file.py::test_a_corrupt_file_is_reported_set_aside_and_ignored",),
    ),
    Fault(
        "files: one full disk of a recording, and it goes on",
        "proxy/recorder.py",
        "        except OSError as error:\n            self.num_lost = 1",
        "        except MemoryError as error:\n            self.num_lost = 1",
        ("proxy/test_command.py::test_a_full_disk_ends_the_recording_and_no_traffic",),
    ),
    Fault(
        "files: a decision is made again, with other inputs",
        "core/policy_caller.py",
        "    read = from_json(value)\n",
        "    read = 0.0 if value.__class__ is float else from_json(value)\n",
        ("cli/test_replay_decisions.py::test_every_decision_is_made_again",),
    ),
    Fault(
        "files: any hook can be replayed",
        "core/policy_caller.py",
        "            _check_inputs(hook, inputs)\n",
        "",
        ("cli/test_replay_decisions.py::test_what_cannot_be_replayed_is_said",),
    ),
    Fault(
        "files: a cut line refuses the file",
        "records/files.py",
        'if self.note is not None and not line.endswith(b"\\n"):',
        "if False:",
        ("records/test_files.py::test_a_cut_last_line_is_left_out_with_a_note",),
    ),
    Fault(
        "files: true is a number",
        "records/codec.py",
        "if type(value) is not int or not low <= value <= high:",
        "if not isinstance(value, int) or not low <= value <= high:",
        ("workload/test_hostile_rows.py::test_one_hostile_field_refuses_the_whole_file",),
    ),
    Fault(
        "files: keys of any depth are kept",
        "records/codec.py",
        "if is_deep(self.values[field]):",
        "if False:",
        ("workload/test_hostile_rows.py::test_a_key_too_deep_to_be_written_again_is_refused",),
    ),
    Fault(
        "bound on waits: who leaves makes those before it overdue",
        "core/stock_queue.py",
        "heapq.heappush(self._gone, (wait.place, work))",
        "self._began += work",
        ("core/test_stock_queue.py::test_aborted_turns_do_not_shorten_the_wait_of_those_before_them",),
    ),
    Fault(
        "bound on waits: who leaves still makes those behind it wait",
        "core/stock_queue.py",
        "self._skipped += work",
        "pass",
        ("core/test_stock_queue.py::test_aborted_turns_do_not_lengthen_the_wait_of_those_behind_them",),
    ),
    Fault(
        "files: a small compressed file may fill the memory",
        "records/files.py",
        "self._longest = min(MAX_FILE_BYTES, self._most_bytes)",
        "self._longest = MAX_FILE_BYTES",
        ("records/test_files.py::test_a_small_file_that_unpacks_to_a_large_one_is_refused",),
    ),
    Fault(
        "files: only each line of a compressed file is bounded",
        "records/files.py",
        "most = self._longest if self.is_whole else self._most_bytes",
        "most = self._longest if self.is_whole else math.inf",
        ("workload/test_hostile_rows.py::test_lines_of_a_gzip_bomb_count_together",),
    ),
    Fault(
        "files: each turn of a conversation has a copy of what is before it",
        "workload/formats/sharegpt.py",
        "LoggedTurn(part, pieces, len(pieces),",
        "LoggedTurn(part, tuple(pieces), len(pieces),",
        ("workload/test_hostile_rows.py::test_a_long_conversation_is_in_memory_once",),
    ),
    Fault(
        "files: names of nested agents have the square of their depth",
        "workload/formats/otel_spans.py",
        'return f"{span.outermost}/{span.key[1]}"',
        'return f"{span.outer.agent.job_id}/{span.key[1]}"',
        ("workload/test_workload_otel_spans.py::test_names_of_nested_agents_do_not_grow_with_their_depth",),
    ),
    Fault(
        "hints: only the beginning of a long id counts",
        "core/requests.py",
        'value = f"{value[:MAX_DIGESTED]}{len(value)}{value[-MAX_DIGESTED:]}"',
        "value = value[:MAX_DIGESTED]",
        ("core/test_hints.py::test_of_an_id_of_megabytes_both_ends_and_the_length_count",),
    ),
    Fault(
        "hints: the engine looks at every value of a client's field",
        "records/codec.py",
        "if len(level) > MAX_VALUES:",
        "if len(level) > 2 * MAX_VALUES:",
        ("records/test_codec.py::test_a_list_of_millions_of_values_counts_as_deep",),
    ),
    Fault(
        "tiers: each part of a store names all chunks before it",
        "vllm/compat/offload.py",
        "num_before, num_tokens = first // size, self.tokens_per_chunk",
        "num_before, num_tokens = 0, self.tokens_per_chunk",
        ("vllm/test_tiers.py::test_a_turn_that_is_stored_in_parts_costs_each_chunk_once",),
    ),
    Fault(
        "tiers: one step looks at all jobs that are due",
        "vllm/tiers/background.py",
        "self._load(job_id, away, meta)\n                return",
        "self._load(job_id, away, meta)\n                continue",
        ("vllm/test_tiers.py::test_one_step_looks_at_one_job_that_is_due",),
    ),
    Fault(
        "tiers: a context is fetched at once",
        "vllm/tiers/background.py",
        "end = min(len(hashes), first + MAX_AT_ONCE * self._port.blocks_per_chunk)",
        "end = len(hashes)",
        (
            "vllm/test_tiers.py::test_a_long_context_is_fetched_in_parts",
            "vllm/test_tiers.py::test_no_further_part_is_fetched_once_a_turn_waits",
        ),
    ),
    Fault(
        "tiers: each write that ends late ranks all of its turn's chunks",
        "vllm/tiers/disk.py",
        "chains.has_ended and not chains.num_disk_stores",
        "chains.has_ended",
        ("vllm/test_wishes.py::test_the_chunks_of_a_turn_are_ranked_once_on_a_slow_disk",),
    ),
    Fault(
        "tiers: one step gives up all wished chunks that are due",
        "core/tier_order.py",
        "for _ in range(MAX_EXPIRED):\n            first",
        "while True:\n            first",
        ("core/test_kept_chunks.py::test_one_call_gives_up_a_bounded_number",),
    ),
    Fault(
        "tiers: a lower share for wishes holds for later wishes only",
        "core/tier_order.py",
        "if len(self._by_end) <= self.max_chunks or most is None:\n                    return",
        "return",
        ("core/test_kept_chunks.py::test_a_lower_limit_holds_soon",),
    ),
    Fault(
        "tiers: a wish counts before its turn has ended",
        "vllm/compat/offload.py",
        "if self._use.wished and self._chains.has_ended else",
        "if self._use.wished else",
        ("vllm/test_wishes.py::test_an_aborted_turn_s_wish_keeps_nothing",),
    ),
    Fault(
        "tiers: what waits to be fetched keeps the policy's key before",
        "vllm/tiers/background.py",
        "away.use = replace(away.use, key=())",
        "pass",
        ("vllm/test_tiers.py::test_keys_of_the_policy_before_rank_nothing_that_is_stored_later",),
    ),
    Fault(
        "tiers: the policy of a canary orders everybody's KV",
        "core/driver.py",
        'return self.policy.overrides("tier_key") and not self._canary.is_on',
        'return self.policy.overrides("tier_key")',
        ("vllm/test_tiers.py::test_with_a_canary_host_memory_has_no_order_of_the_policy",),
    ),
    Fault(
        "record: without room a request that is to be read is cut",
        "proxy/proxy.py",
        "_chain(whole, body), None)",
        "_send_bytes(whole), None)",
        ("proxy/test_recording.py::test_without_room_for_its_body_a_request_passes_as_it_is",),
    ),
    Fault(
        "record: headers that cannot be sent whole pass",
        "proxy/proxy.py",
        "if not _can_send(request.headers):",
        "if not request.headers:",
        ("proxy/test_proxy.py::test_bytes_in_a_header_that_would_be_lost_are_refused",),
    ),
    Fault(
        "record: a closed terminal kills it",
        "proxy/proxy.py",
        "signals = (signal.SIGINT, *get_end_signals())",
        "signals = (signal.SIGINT, signal.SIGTERM)",
        ("proxy/test_command.py::test_a_signal_ends_the_recording_whole",),
    ),
    Fault(
        "bench: a sweep whose server ends prints nothing",
        "client/bench.py",
        "            if not results:\n                raise",
        "            raise",
        ("client/test_sweep.py::test_what_was_measured_is_printed_if_the_server_ends_between_two_loads",),
    ),
    Fault(
        "bench: a sweep ends where its table cannot be written",
        "client/bench.py",
        "            except ConfigError as error:\n                problem = str(error)",
        "            except ConfigError:\n                raise",
        ("client/test_sweep.py::test_a_folder_that_cannot_be_written_to_ends_no_sweep",),
    ),
    Fault(
        "profile: a step that fails once ends it",
        "client/profile.py",
        "if not error.can_retry:",
        "if error.can_retry:",
        ("client/test_profile.py::test_a_step_that_fails_once_is_timed_again",),
    ),
    Fault(
        "routers: a turn goes back to the engine that failed it",
        "core/dispatcher.py",
        "if answer.engine == failed and len(fleet.engines) > 1:",
        "if False:",
        ("core/test_dispatcher.py::test_a_turn_that_an_engine_failed_goes_to_another_one_if_there_is_one",),
    ),
    Fault(
        "routers: a server that fails at once gets all turns",
        "client/load.py",
        "self._num_failures[client.url] += error.can_retry",
        "self._num_failures[client.url] += False and error.can_retry",
        ("client/test_servers.py::test_a_server_that_fails_at_once_gets_few_turns",),
    ),
    Fault(
        "routers: each look goes through all jobs of an engine that changed",
        "routers/tenuto.py",
        "if engine.num_changes * RENEW_SHARE > len(engine.jobs):",
        "if engine.num_changes:",
        ("routers/test_parts.py::test_ever_new_jobs_of_strangers_do_not_make_each_look_long",),
    ),
    Fault(
        "routers: prompts that Ray's replicas refuse count as long jobs",
        "ray/router.py",
        "if arrival.num_prompt_tokens > self._max_model_len:",
        "if False:",
        ("ray/test_books.py::test_prompts_that_no_replica_takes_do_not_send_new_jobs_elsewhere",),
    ),
    Fault(
        "leases: a turn that reads no cache waits for its own job's lease",
        "core/leases.py",
        "if num_freed < num_blocks and self._get_spared(turn) is None",
        "if num_freed < 0 and self._get_spared(turn) is None",
        ("vllm/test_leases.py::test_a_turn_that_reads_no_cache_takes_its_own_jobs_lease",),
    ),
    Fault(
        "leases: they outlive the weights that computed them",
        "vllm/scheduler.py",
        "        else:\n            self.driver.drop_all(time.monotonic())\n\n    def load_adapter",
        "\n    def load_adapter",
        ("vllm/test_leases.py::test_no_lease_outlives_the_weights_that_computed_it",),
    ),
    Fault(
        "tenants: a prompt that never fits is free under policies without leases",
        "vllm/hooks.py",
        'asked.overrides("preempt_key") or is_fair',
        'asked.overrides("preempt_key")',
        ("vllm/test_attacks.py::test_prompts_that_never_fit_in_time_keep_nobody_waiting_again_and_again",),
    ),
    Fault(
        "tenants: a prompt that never fits is free in the simulator",
        "sim/engine/scheduler.py",
        "if not is_allocated and request.status is not Status.RUNNING:",
        "if request is None:",
        ("differential/test_leases.py::test_the_same_decisions_for_tenants_whose_clients_leave",),
    ),
    Fault(
        "leases: a turn that was preempted when it ended keeps nothing",
        "vllm/engine.py",
        "if self._found or not request.num_preemptions:",
        "if request is not None:",
        (
            "vllm/test_leases.py::test_a_turn_that_was_preempted_while_its_last_token_was_under_way_keeps_its_cache",
        ),
    ),
    Fault(
        "trace: a header has short names",
        "records/trace.py",
        'if record.get("kind") != "header":',
        "if record:",
        (
            "records/test_trace_file.py::test_what_a_policy_learned_is_found_again_by_the_names_that_records_have",
        ),
    ),
    Fault(
        "files: a trace has request ids of any length",
        "records/trace.py",
        "record = _shorten_names(record)",
        "pass",
        ("vllm/test_scheduler.py::test_request_ids_of_any_length_have_short_names_in_a_trace",),
    ),
    Fault(
        "files: any kind of file may be the state",
        "vllm/state.py",
        "if not stat.S_ISREG(os.stat(path).st_mode):\n        raise ValueError",
        "if stat.S_ISFIFO(os.stat(path).st_mode):\n        raise MemoryError",
        ("vllm/test_state_file.py::test_a_pipe_in_the_file_s_place_stops_no_engine",),
    ),
    # Tiers and pinned prefixes.
    Fault(
        "disk: a copy that ends later renews the wish of an ended job",
        "vllm/tiers/disk.py",
        "self._kept.max_chunks > 0 and not is_over",
        "self._kept.max_chunks > 0",
        ("vllm/test_wishes.py::test_copies_under_way_renew_no_wish_of_a_job_that_its_client_ended",),
    ),
    Fault(
        "tiers: a chunk is lost with one tenant's wish, whoever else wishes it",
        "core/tier_order.py",
        "self._remove(gone, most)",
        "self.discard(gone)",
        (
            "core/test_kept_chunks.py"
            "::test_no_tenant_takes_a_chunk_from_another_one_s_part_with_a_longer_wish",
        ),
    ),
    Fault(
        "tiers: all tenants' calls of a tool tell when KV is fetched",
        "vllm/tiers/background.py",
        "tool = repr((tenant, turn.tool.name)) if",
        "tool = turn.tool.name if",
        ("vllm/test_tiers.py::test_a_stranger_s_calls_do_not_change_when_kv_is_fetched",),
    ),
    Fault(
        "tiers: whoever comes later takes others' place among the jobs for which KV is fetched",
        "vllm/tiers/background.py",
        "self._pop(str(self._order.get_first_to_forget()))",
        "self._pop(next(iter(self._away)))",
        ("vllm/test_tiers.py::test_a_flood_of_jobs_takes_no_other_tenant_s_fetch",),
    ),
    Fault(
        "tiers: a failed store is loaded",
        "vllm/compat/specs.py",
        "            failed |= _find_failed(meta)\n",
        "",
        ("vllm/test_tiers.py::test_a_failed_store_is_never_loaded", "vllm/test_tier_chaos.py"),
    ),
    Fault(
        "tiers: a copy that was given up writes",
        "vllm/tiers/copies.py",
        "            if job.has_failed:\n                return\n            if rows is None:",
        "            if rows is None:",
        ("vllm/test_tier_copies.py::test_a_copy_that_hangs_is_given_up_and_writes_nothing_afterwards",),
    ),
    Fault(
        "tiers: no checksum",
        "vllm/tiers/files.py",
        "if zlib.crc32(data, zlib.crc32(key)) != checksum:",
        "if False:",
        ("vllm/test_tier_copies.py::test_a_damaged_file_is_found", "fuzzing: tier-files"),
    ),
    Fault(
        "disk: KV of other weights",
        "vllm/tiers/disk.py",
        '_Space(engine / (origin or f"once-{number}")',
        '_Space(engine / "any"',
        ("vllm/test_tier_copies.py::test_kv_of_other_weights_is_not_found",),
    ),
    Fault(
        "disk: a file of other weights that was moved",
        "vllm/tiers/files.py",
        "if found != origin:",
        "if False:",
        ("vllm/test_tier_copies.py::test_a_file_of_other_weights_is_not_read",),
    ),
    Fault(
        "disk: everybody may open the folder",
        "vllm/tiers/files.py",
        "            folder.chmod(0o700)\n",
        "            pass\n",
        ("vllm/test_tier_copies.py::test_the_folder_is_its_owner_s_alone",),
    ),
    Fault(
        "disk: another user's folder",
        "vllm/tiers/files.py",
        "if found.st_uid != os.geteuid():",
        "if False:",
        ("vllm/test_tier_copies.py::test_a_folder_with_others_files_or_of_another_user_is_refused",),
    ),
    Fault(
        "disk: another user's files",
        "vllm/tiers/files.py",
        "return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()",
        "return stat.S_ISREG(found.st_mode)",
        ("vllm/test_tier_copies.py::test_what_another_user_put_into_the_folder_is_not_used",),
    ),
    Fault(
        "disk: another user's engine folder",
        "vllm/tiers/files.py",
        "if path.is_symlink() or path.lstat().st_uid != os.geteuid():",
        "if path.is_symlink():",
        ("vllm/test_tier_copies.py::test_what_another_user_put_into_the_folder_is_not_used",),
    ),
    Fault(
        "disk: reads wait for writes",
        "vllm/tiers/disk.py",
        "self._start(job_metadata, self._readers)",
        "self._start(job_metadata, self._writers)",
        ("vllm/test_tier_copies.py::test_reads_do_not_wait_for_writes_that_hang",),
    ),
    Fault(
        "disk: one machine's share of each chunk",
        "vllm/tiers/host.py",
        "if self._port.disks and may_span_machines(config.parallel_config):",
        "if False:",
        ("vllm/test_tier_origin.py::test_a_disk_is_not_used_if_workers_may_be_on_several_machines",),
    ),
    Fault(
        "disk: the engine waits for removals",
        "vllm/tiers/disk.py",
        "self._writers.submit(self._remove, gone)",
        "self._remove(gone)",
        ("vllm/test_tier_copies.py::test_the_engine_does_not_wait_for_removals_that_hang",),
    ),
    Fault(
        "disk: every failure is logged",
        "vllm/complaints.py",
        "            if now_s < self._next_s:\n                return\n",
        "",
        ("vllm/test_tier_copies.py::test_a_full_disk_is_logged_at_a_bounded_rate",),
    ),
    Fault(
        "tiers: a load brings the block before a window, which nobody looked for",
        "vllm/compat/groups.py",
        "return call(allocate, args, kwargs, is_load=num_external_computed_tokens > 0)",
        "return call(allocate, args, kwargs, is_load=False)",
        ("vllm/test_hybrid_tiers.py::test_a_load_brings_what_the_window_needs_and_no_block_before_it",),
    ),
    Fault(
        "tiers: what was found makes room for what comes from the disk",
        "vllm/compat/offload.py",
        "self._hits if self._looking is req_context else ()",
        "()",
        (
            "vllm/test_tiers.py::test_what_a_request_found_stays_when_more_of_it_comes_from_the_disk",
            "vllm/test_hybrid_tiers.py::test_random_jobs_above_a_small_host_memory_and_a_small_disk",
        ),
    ),
    Fault(
        "tiers: parts of blocks are stored whatever the bound",
        "vllm/compat/offload.py",
        "return status is None or num_tokens <=",
        "return True or num_tokens <=",
        ("vllm/test_hybrid_tiers.py::test_a_part_of_a_block_is_not_stored_beyond_what_a_request_may_store",),
    ),
    Fault(
        "disk: KV of pictures that were processed in another way",
        "vllm/compat/origin.py",
        '"pictures": [_get_pictures(each.multimodal_config) for each in models],',
        '"pictures": [],',
        ("vllm/test_tier_origin.py::test_what_changes_pictures_counts",),
    ),
    Fault(
        "tiers: what could not be loaded is told as loaded",
        "vllm/compat/specs.py",
        "results.failed_recving.update(request_ids[each] for each in failed & request_ids.keys())",
        "pass",
        (
            "vllm/test_tiers.py::test_failed_loads_are_computed_again",
            "vllm/test_tier_chaos.py::test_random_events_leave_no_trace",
            "vllm/test_tier_chaos.py",
        ),
    ),
    Fault(
        "tiers: blocks stay reserved after a failed load",
        "vllm/compat/scheduler.py",
        "        if not request.num_computed_tokens:\n",
        "        if False:\n",
        ("vllm/test_tiers.py::test_a_failed_load_does_not_stand_in_the_way_of_the_next",),
    ),
    Fault(
        "tiers: a fetch does not wait for the stores of its blocks",
        "vllm/compat/offload.py",
        "meta.jobs_to_flush |= scheduler._block_id_to_pending_jobs.get(block_id, set())",
        "pass",
        ("vllm/test_tiers.py::test_a_fetch_takes_no_block_whose_store_is_under_way",),
    ),
    Fault(
        "tiers: another's load does not wait for the stores of its blocks",
        "vllm/compat/offload.py",
        "self._scheduler._current_batch_allocated_block_ids |= ids",
        "pass",
        ("vllm/test_tiers.py::test_another_s_load_takes_no_block_whose_store_is_under_way",),
    ),
    Fault(
        "tiers: what goes does not follow the policy",
        "core/tier_order.py",
        "if up_to is not None and entry[1][0] > up_to:",
        "if False:",
        ("vllm/test_tiers.py::test_a_job_behind_does_not_displace_a_job_before",),
    ),
    Fault(
        "tiers: a job that ends takes along what others used",
        "core/tier_order.py",
        "known.owner, known.is_shared = owner, True",
        "known.owner = owner",
        ("core/test_tier_order.py::test_a_job_that_ends_takes_along_what_only_it_used",),
    ),
    Fault(
        "tiers: stores do not wait for loads",
        "vllm/tiers/host.py",
        "return loads > 0 or stores *",
        "return stores *",
        ("vllm/test_tiers.py::test_a_load_waits_for_no_store",),
    ),
    Fault(
        "tiers: fetched blocks stay taken",
        "vllm/tiers/background.py",
        "        self._port.give_back_blocks(load.blocks)\n\n    def cancel",
        "\n    def cancel",
        ("vllm/test_tiers.py::test_a_wrong_guess_costs_the_copy_only",),
    ),
    Fault(
        "tiers: fetched while turns wait",
        "vllm/tiers/host.py",
        "is_free = self._is_followed and not loads and not count_waiting(self._scheduler)",
        "is_free = self._is_followed and not loads",
        ("vllm/test_tiers.py::test_nothing_is_fetched_while_a_turn_waits",),
    ),
    Fault(
        "tiers: a process that may not be looked at keeps the memory of killed servers",
        "vllm/compat/specs.py",
        "            if name in maps.read_text():\n                return True",
        "            if name in maps.read_text():\n                return True\n            continue\n"
        "        return True",
        ("vllm/test_tier_copies.py::test_memory_that_killed_servers_left_is_removed",),
    ),
    Fault(
        "disk: files are told apart by name and size",
        "vllm/compat/origin.py",
        "found.st_size, found.st_mtime_ns, found.st_ctime_ns)",
        "found.st_size)",
        (
            "vllm/test_tier_origin.py::test_other_weights_count",
            "vllm/test_tier_server.py::test_only_kv_of_the_same_weights_comes_back",
        ),
    ),
    Fault(
        "disk: settings do not count",
        "vllm/compat/origin.py",
        "each.name: _get_config(getattr(vllm_config, each.name))",
        'each.name: ""',
        ("vllm/test_tier_origin.py::test_each_setting_that_changes_kv_counts",),
    ),
    Fault(
        "disk: weights from anywhere are known",
        "vllm/compat/origin.py",
        "if load_format not in LOCAL_FORMATS:",
        "if False:",
        ("vllm/test_tier_origin.py::test_what_is_not_known_is_said",),
    ),
    Fault(
        "disk: a reset keeps the files",
        "vllm/tiers/disk.py",
        "        os.rename(space.folder, gone)\n",
        "        gone.mkdir()\n",
        ("vllm/test_tier_copies.py::test_nothing_of_before_a_reset_is_found_after_it_or_after_a_restart",),
    ),
    Fault(
        "disk: a reset does not reach it",
        "vllm/compat/offload.py",
        "for disk in self.disks:",
        "for disk in ():",
        (
            "vllm/test_tier_server.py::test_only_kv_of_the_same_weights_comes_back",
            "vllm/test_tier_origin.py::"
            "test_copies_under_way_do_not_reach_what_is_read_after_an_adapter_is_loaded_anew",
        ),
    ),
    Fault(
        "disk: what runs during a reset is stored",
        "vllm/tiers/host.py",
        "            self._is_mixed = True\n",
        "            self._is_mixed = False\n",
        ("vllm/test_tier_origin.py::test_what_runs_during_a_reset_is_not_stored_afterwards",),
    ),
    Fault(
        "disk: engines do not lock their folders",
        "vllm/tiers/disk.py",
        "                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "                pass\n",
        ("vllm/test_tier_copies.py::test_two_engines_and_two_ranks_share_no_files",),
    ),
    Fault(
        "disk: links are followed",
        "vllm/tiers/files.py",
        "_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK",
        "_FLAGS = os.O_NONBLOCK",
        ("vllm/test_tier_copies.py::test_what_stands_under_a_chunk_s_name_blocks_nothing_and_stays",),
    ),
    Fault(
        "disk: what cannot be removed ends the engine",
        "vllm/tiers/disk.py",
        "            with contextlib.suppress(OSError):\n                path.unlink(missing_ok=True)",
        "            path.unlink(missing_ok=True)",
        ("vllm/test_tier_copies.py::test_a_folder_that_nothing_can_be_removed_from_ends_no_engine",),
    ),
    Fault(
        "disk: what could not be written counts as written",
        "vllm/tiers/disk.py",
        "                if not is_chunk(path, self._file_bytes):\n",
        "                each.good.add(key)\n                if not is_chunk(path, self._file_bytes):\n",
        ("vllm/test_tier_copies.py::test_a_full_disk_costs_the_copy_only",),
    ),
    Fault(
        "disk: unfinished files stay",
        "vllm/tiers/disk.py",
        "                if key is None:\n                    os.unlink(entry.path)",
        "                if key is None:\n                    pass",
        ("vllm/test_tier_copies.py::test_chunks_survive_a_restart",),
    ),
    Fault(
        "disk: turns wait for a read that hangs",
        "vllm/tiers/disk.py",
        "if name not in self._files or name is None or self._hangs():",
        "if name not in self._files or name is None:",
        ("vllm/test_tier_copies.py::test_while_a_read_hangs_the_disk_counts_as_empty",),
    ),
    Fault(
        "pins: they do not yield",
        "core/leases.py",
        "while num_freed < num_blocks and self.pins.demote():",
        "while False and self.pins.demote():",
        (
            "vllm/test_pinned_prefixes.py::test_pins_that_exceed_the_cache_stall_nothing",
            "vllm/test_pinned_prefixes.py::test_a_request_as_large_as_the_cache_runs",
        ),
    ),
    Fault(
        "pins: what is not shared is pinned",
        "core/leases.py",
        "if turn.job.num_turns > 1 or not num_tokens:\n            return\n",
        "num_tokens = num_tokens or turn.arrival.num_prompt_tokens - 1\n",
        ("vllm/test_pinned_prefixes.py::test_a_pinned_prefix_outlives_a_flood",),
    ),
    Fault(
        "pins: a reset leaves them",
        "core/leases.py",
        "        self.pins.drop_all()\n        for lease in self.leases:",
        "        for lease in self.leases:",
        ("vllm/test_pinned_prefixes.py::test_a_reset_drops_pins_and_so_does_a_live_change",),
    ),
    Fault(
        "steps: turns behind a prompt that is computed in parts wait for it",
        "vllm/scheduler.py",
        "            put_decodes_first(self)\n",
        "            pass\n",
        ("vllm/test_step_budget.py::test_turns_that_decode_have_a_token_in_every_step",),
    ),
    Fault(
        "simulator: turns behind a prompt that is computed in parts wait for it",
        "sim/engine/scheduler.py",
        'state.running.sort(key=attrgetter("is_prefill_chunk"))',
        "pass",
        ("sim/test_scheduler.py::test_turns_that_decode_have_a_token_in_every_step",),
    ),
    Fault(
        "simulator: a step that only preempts is taken for an idle engine",
        "sim/event_loop.py",
        "if not step.num_tokens and not step.preempted:",
        "if not step.num_tokens:",
        (
            "sim_server/test_engine.py::test_a_step_that_only_preempts_is_followed_by_another",
            "sim/test_hooks.py::test_a_step_that_only_preempts_is_followed_by_another",
        ),
    ),
    # Routers and ranks.
    Fault(
        "routers: turns of a dead engine are forgotten",
        "core/dispatcher.py",
        "return [sending for turn_id in lost for sending in self.fail(turn_id, now_s)]",
        "return []",
        (
            "core/test_dispatcher.py::test_turns_of_a_dead_engine_go_elsewhere_each_once",
            "core/test_dispatcher.py::test_nothing_is_lost_or_served_twice_in_a_storm",
            "sim/test_fleet.py::test_faults_lose_no_turn_and_serve_none_twice",
        ),
    ),
    Fault(
        "routers: a draining engine gets turns",
        "core/dispatcher.py",
        "        self.engines.drain(name)\n",
        "",
        ("core/test_dispatcher.py::test_a_draining_engine_keeps_its_open_turns_and_gets_no_new_ones",),
    ),
    Fault(
        "routers: without an engine turns go somewhere",
        "core/dispatcher.py",
        "        if not self.engines.ready:\n            self._hold(turn, (now_s,))",
        "        if False:\n            self._hold(turn, (now_s,))",
        ("core/test_dispatcher.py::test_without_an_engine_turns_wait_for_one",),
    ),
    Fault(
        "routers: a job that has begun waits behind new ones for the first engine",
        "core/dispatcher.py",
        "return next(iter(self._later.values()))",
        "pass",
        ("core/test_dispatcher.py::test_a_started_job_waits_for_no_new_one_once_an_engine_is_there",),
    ),
    Fault(
        "routers: answers are not checked",
        "core/dispatcher.py",
        "            check_route(answer, turn, fleet)\n",
        "",
        ("core/test_dispatcher.py::test_a_router_that_answers_wrongly_is_counted_and_replaced",),
    ),
    Fault(
        "routers: all turns are of one tenant",
        "core/dispatcher.py",
        "self._tenants.push(name, (num_open,))",
        "self._tenants.push(name, (0,))",
        ("core/test_dispatcher.py::test_a_hot_tenant_waits_behind_its_own_turns",),
    ),
    Fault(
        "routers: idle jobs are kept",
        "core/dispatcher.py",
        "return self._idle.get_first_to_forget() if len(self._idle) > self._max_idle else None",
        "return None",
        ("core/test_dispatcher.py::test_idle_jobs_are_forgotten_in_the_end",),
    ),
    Fault(
        "routers: a job that would be forgotten as soon as it is idle is kept",
        "core/dispatcher.py",
        "if forgotten is not None and self._jobs.get(forgotten) is not None:",
        "if forgotten is not None and forgotten != job_id:",
        ("core/test_dispatcher.py::test_idle_jobs_of_ever_new_tenants_are_forgotten_too",),
    ),
    Fault(
        "ranks: a turn without an answer stays in the books",
        "vllm/middleware.py",
        "                    found.turn.close()",
        "                    pass",
        ("vllm/test_ranks.py::test_a_turn_that_ends_without_an_answer_leaves_the_books",),
    ),
    Fault(
        "routers: a job without an answer counts for ever",
        "routers/tenuto.py",
        "            self._placed.remove(turn.job_id)",
        "            pass",
        (
            "routers/test_routers.py::"
            "test_ours_counts_a_job_whose_turn_got_no_answer_no_more_until_it_comes_back",
        ),
    ),
    Fault(
        "routers: a job counts no more when one of its turns ends",
        "routers/tenuto.py",
        "return bool(turns)",
        "return False",
        ("routers/test_routers.py::test_ours_counts_a_job_as_long_as_one_of_its_turns_runs",),
    ),
    Fault(
        "routers: every message is read, however many they are",
        "core/dispatcher.py",
        "for message in messages[:MAX_PARTS])",
        "for message in messages)",
        ("core/test_routing_requests.py::test_messages_that_are_not_compared_are_not_read_one_by_one",),
    ),
    Fault(
        "routers: only tokens are bounded, not messages",
        "routers/_prefixes.py",
        " or len(own) > self._max_parts:",
        ":",
        ("routers/test_routers.py::test_prompts_of_tiny_messages_are_forgotten_before_they_fill_the_memory",),
    ),
    Fault(
        "routers: a prompt may have no tokens",
        "core/dispatcher.py",
        "num_prompt_tokens=max(1, _count_tokens(prompt, parts)),",
        "num_prompt_tokens=_count_tokens(prompt, parts),",
        ("core/test_routing_requests.py::test_what_makes_no_sense_is_a_short_prompt", "fuzzing: routed"),
    ),
)

UNPLANTED = {
    "vllm/test_server.py::test_a_killed_client_leaves_nothing": "what is shown is vLLM's own abort",
    "vllm/test_server.py::test_the_trace_is_complete_after_sigterm": "timing of a process that is ended",
    "vllm/test_server_ranks.py::test_changes_under_load_reach_both_ranks_and_lose_no_request": (
        "a server with two ranks; test_two_operators_… has the same fault"
    ),
}
"""Checks that docs/faults.md names and for which no fault is planted, and why."""


def run_check(check: str, source: Path) -> str:
    """A check's result on this source: `found`, `NOT FOUND`, `skipped`, or `BROKEN` if it failed to run."""
    if check.startswith(FUZZING):
        arguments = ["experiments.fuzz", "--parser", check.removeprefix(FUZZING), "--inputs", str(NUM_INPUTS)]
        arguments += ["--out", str(source / "fuzz")]
    else:
        arguments = ["pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{check}"]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *arguments],
            check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "found"  # the check hangs
    if done.returncode == 1:
        return "found"
    if done.returncode:
        return f"BROKEN: {done.stdout[-300:]}{done.stderr[-300:]}"
    return "skipped" if " passed" not in done.stdout and not check.startswith(FUZZING) else "NOT FOUND"


def plant(fault: Fault, source: Path) -> None:
    """Put the fault into a copy of the source. Raises ValueError unless its text occurs exactly once."""
    path = source / "tenuto" / fault.file
    text = path.read_text()
    if text.count(fault.text) != 1:
        raise ValueError(f"{fault.name}: the text is {text.count(fault.text)} times in {fault.file}")
    path.write_text(text.replace(fault.text, fault.replacement))


def try_fault(fault: Fault, only_check: str = "") -> dict[str, str]:
    """The result of each check on a copy of the source with this fault."""
    with tempfile.TemporaryDirectory(prefix="tenuto-planted-") as folder:
        source = Path(folder)
        shutil.copytree(SOURCE, source / "tenuto", ignore=shutil.ignore_patterns("__pycache__"))
        plant(fault, source)
        return {check: run_check(check, source) for check in fault.checks if only_check in check}


def main(arguments: list[str] | None = None) -> int:
    """Plant the faults one by one; 0 if each check found its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--check", default="", help="checks whose name holds this")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parsed = parser.parse_args(arguments)
    counts: dict[str, int] = {}
    for fault in FAULTS:
        if parsed.only not in fault.name or not any(parsed.check in check for check in fault.checks):
            continue
        results = dict.fromkeys(fault.checks, "") if parsed.list else try_fault(fault, parsed.check)
        for check, result in results.items():
            counts[result.split(":")[0]] = counts.get(result.split(":")[0], 0) + 1
            print(f"{result:9}  {fault.name}  [{check}]", flush=True)
    if not parsed.list:
        print(", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts.keys() - {"", "found", "skipped"} else 0


if __name__ == "__main__":
    sys.exit(main())
