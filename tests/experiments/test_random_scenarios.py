"""Random scenarios: what is drawn is whole and repeatable, and what has run is told truly."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import decision_code
from experiments.decision_code import Code
from experiments.json_lines import append_lines
from experiments.random_scenarios import __main__ as command
from experiments.random_scenarios import runs
from experiments.random_scenarios.draw import Flow, draw_scenario, make_jobs
from experiments.random_scenarios.report import (
    BEGIN,
    END,
    MATTERS,
    Found,
    compare_codes,
    draw_picture,
    format_report,
    write_page,
)
from experiments.random_scenarios.runs import (
    CLAIRVOYANT,
    OURS,
    STOCK,
    UNLIMITED,
    Book,
    Place,
    get_setup,
    run_place,
)
from experiments.results.settings import Setting
from tenuto.sim.run import Extras, run
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Span, Workload

RIVAL = Setting("thunderagent/async", 512)


def make_record(number: int, setting: Setting, mean_s: float, *, repeat: int = 0, **more: Any) -> dict:
    stats = {"mean": mean_s, "p95": 2 * mean_s, "p99": 3 * mean_s}
    return {
        "seed": 1,
        "number": number,
        "repeat": repeat,
        "policy": setting.policy,
        "step": setting.step,
        "interval": setting.interval,
        "job_s": stats,
        "slowdown": {"mean": mean_s},
        "ttft_s": {"mean": mean_s, "p95": mean_s},
        "plain_ttft_s": None,
        "queue_s": {"max": mean_s},
        "recomputed_tokens": 7,
        "loaded_tokens": None,
        "preemptions": 0,
        "code": "now",
        **more,
    }


def make_found(*means: tuple[float, float, float]) -> Found:
    """One scenario for each: the means of stock, of the rival and of ours."""
    records = []
    for number, (stock, rival, ours) in enumerate(means):
        records += [make_record(number, STOCK, stock), make_record(number, RIVAL, rival)]
        records += [make_record(number, OURS, ours), make_record(number, UNLIMITED, ours / 2)]
    return Found(records)


@pytest.mark.slow
def test_a_scenario_depends_on_its_seed_and_number_only() -> None:
    one, again, other = draw_scenario(101, 3), draw_scenario(101, 3), draw_scenario(101, 4)
    assert one == again != other
    jobs = make_jobs(one, Flow(2.0, 30))
    assert jobs == make_jobs(again, Flow(2.0, 30)) != make_jobs(one, Flow(2.0, 30), repeat=1)
    # A longer flow begins with the same jobs.
    longer = {job.job_id: job.turns for job in make_jobs(one, Flow(2.0, 40)).jobs}
    assert all(longer[job.job_id] == job.turns for job in jobs.jobs)
    for job in jobs.jobs:
        assert job.turns[-1].tool is None
        assert all(turn.num_prompt_tokens + turn.num_output_tokens <= one.max_context for turn in job.turns)


@pytest.mark.slow
def test_a_seed_of_people_draws_more_of_them_than_agents() -> None:
    for number in range(6):
        kinds = draw_scenario("people-3", number).kinds
        shares = {kind.name: kind.share for kind in kinds}
        assert sum(shares.values()) == pytest.approx(1)
        assert 0.5 <= shares.get("plain", 0.0) + shares.get("people", 0.0) <= 0.9
    scenario = draw_scenario("people-3", 0)
    assert scenario.name == "people-3/0"
    assert scenario.kinds != draw_scenario(3, 0).kinds
    assert make_jobs(scenario, Flow(2.0, 30)).jobs


def test_a_seed_is_a_number_of_one_of_two_priors() -> None:
    assert command.read_seed("7") == 7
    assert command.read_seed("people-07") == "people-7"
    for wrong in ("people-", "people", "agents-7", "7.5"):
        with pytest.raises(ArgumentTypeError, match="neither a number nor people-N"):
            command.read_seed(wrong)


@pytest.mark.slow
def test_a_ramp_arrives_ever_faster_and_keeps_its_mean_rate() -> None:
    ramp = replace(draw_scenario(101, 3), arrival="ramp")
    times = sorted(job.arrival_s for job in make_jobs(ramp, Flow(5.0, 400)).jobs if job.parent is None)
    assert times[-1] == pytest.approx(400 / 5.0, rel=0.15)
    half = sum(time < times[-1] / 2 for time in times)
    assert 0.25 * 400 < half < 0.42 * 400  # a third of them


def test_a_template_begins_every_prompt_and_changes_nothing_else() -> None:
    scenario = draw_scenario(3, 1)
    jobs = make_jobs(scenario, Flow(1.0, 20)).jobs
    with_it = runs.add_template(Workload("jobs", jobs), 32, scenario.max_context).jobs
    heads = {turn.prompt[0] for job in with_it for turn in job.turns if job not in jobs}
    assert heads == {Span("template", 32)}
    for before, after in zip(jobs, with_it, strict=True):
        for old, new in zip(before.turns, after.turns, strict=True):
            assert replace(new, prompt=new.prompt[-len(old.prompt) :]) == old
            assert new.num_prompt_tokens + new.num_output_tokens <= scenario.max_context
    assert runs.add_template(Workload("jobs", jobs), 0, scenario.max_context).jobs == jobs


def test_in_a_closed_loop_an_agent_begins_as_another_ends() -> None:
    scenario = draw_scenario(101, 3)
    scenario = replace(scenario, setup=replace(scenario.setup, kv_tokens=200_000))
    workload = make_jobs(scenario, Flow(1.0, 60))
    closed = runs.close_loop(workload, scenario)
    roots = [job for job in closed.jobs if job.parent is None]
    others = [job for job in roots if job.job_id.startswith(("plain", "people"))]
    agents = [job for job in roots if job not in others]
    assert set(others) <= set(workload.jobs)
    lanes = [job for job in agents if not job.turns[0].after]
    assert 1 < len(lanes) <= len(agents) // 3
    setup, _ = get_setup(scenario, OURS)
    turns = run(setup, LoadOptions(), extras=Extras(workload=closed)).turns
    spans = [
        (min(turn.due_s for turn in own), max(turn.last_token_s for turn in own))
        for job in agents
        if (own := [turn for turn in turns if turn.job == job.job_id])
    ]
    assert len(spans) == len(agents)
    for begin_s, _ in spans:
        at_work = sum(begun_s <= begin_s < end_s for begun_s, end_s in spans)
        assert at_work <= len(lanes)
    alone = replace(workload, jobs=tuple(others))
    assert runs.close_loop(alone, scenario) == alone


def test_settings_change_the_machine_as_their_names_say() -> None:
    scenario = draw_scenario(101, 3)
    assert get_setup(scenario, UNLIMITED)[0].kv_tokens == runs.UNLIMITED_TOKENS
    assert get_setup(scenario, RIVAL)[0].step_tokens == 512
    assert get_setup(scenario, Setting("tenuto", "no host memory"))[0].host_gb == 0
    unbound = get_setup(scenario, Setting("tenuto", "no bound on waits"))[1]
    assert unbound is not None and unbound.max_wait_over_stock is None
    # Ours has the plugin's limits, rivals their own.
    assert get_setup(scenario, OURS)[0].limits == "plugin" != get_setup(scenario, CLAIRVOYANT)[0].limits


def test_ratios_are_told_with_their_losses() -> None:
    found = make_found((10, 9, 5), (10, 10, 10.5), (10, 4, 8))
    assert found.matters == [(1, 0), (1, 2)]
    assert found.get_ratios(STOCK, "mean job time", found.scenarios) == pytest.approx(
        {(1, 0): 0.5, (1, 1): 1.05, (1, 2): 0.8}
    )
    assert found.get_best((1, 1)) in (STOCK, RIVAL)
    text = format_report(found)
    assert "worse by more than 2% in 1" in text
    assert "0.50 to 1.05" in text
    # The worst is named first, with what was computed again.
    worst = text[text.index("The worst five") :]
    assert worst.index("1/2") < worst.index("1/0") and "computed again 7 tokens" in worst


def test_a_policy_stands_at_one_setting_for_all() -> None:
    fast = Setting("thunderagent/async", 2048)
    records = [*make_found((10, 4, 5), (10, 9, 5)).records]
    records += [make_record(0, fast, 8), make_record(1, fast, 4)]
    found = Found(records)
    # 4 and 9 have a smaller geometric mean than 8 and 4? No: 6 and 5.7.
    assert found.get_best_for_all("thunderagent/async") == fast
    assert found.get_best((1, 0)) == RIVAL


def test_a_rule_that_helps_one_row_only_is_shown() -> None:
    """A fault in a policy: it gains on one scenario, and loses on the others."""
    before = make_found((10, 9, 5), (10, 9, 5), (10, 9, 5)).records
    after = make_found((10, 9, 4), (10, 9, 6), (10, 9, 6)).records
    ratios = compare_codes(after, before, "mean job time")
    assert sorted(ratios.values()) == pytest.approx([0.8, 1.2, 1.2])


def test_repeats_give_the_range(tmp_path: Path) -> None:
    records = [
        make_record(0, setting, mean_s, repeat=repeat)
        for repeat, (stock, ours) in enumerate(((10, 5), (10, 8)))
        for setting, mean_s in ((STOCK, stock), (OURS, ours))
    ]
    found = Found(records)
    assert found.get_range((1, 0), "mean job time") == (0.5, 0.8)
    draw_picture(found, tmp_path / "ratios.svg")
    assert (tmp_path / "ratios.svg").read_text(encoding="utf-8").lstrip().startswith("<?xml")


def test_what_has_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run_place(place: Place) -> dict[str, Any]:
        ran.append(place)
        return make_record(place.number, place.setting, 1.0) | {
            "code": str(runs.get_code(1, place.number, place.setting))
        }

    monkeypatch.setattr(runs, "get_code", lambda seed, number, setting: Code("e", "p", setting.policy))
    monkeypatch.setattr(runs, "probe", lambda place: Flow(1.0, 10))
    monkeypatch.setattr(runs, "run_place", run_place)
    book = Book(tmp_path / "kept.jsonl")
    runs.run_all([(1, 0)], [STOCK, OURS], book, workers=1)
    with open(book.path, "a", encoding="utf-8") as file:
        file.write('{"policy": "cut of')
    records = runs.run_all([(1, 0), (1, 1)], [STOCK, OURS], book, workers=1)
    assert [(place.number, place.setting) for place in ran] == [(0, STOCK), (0, OURS), (1, STOCK), (1, OURS)]
    assert len(records) == 4
    # With other rules the scenario stays as it is, and the runs of these are made anew.
    rules = {"stock": "stock", "tenuto": "other"}
    monkeypatch.setattr(runs, "get_code", lambda seed, number, setting: Code("e", "p", rules[setting.policy]))
    monkeypatch.setattr(runs, "probe", pytest.fail)
    runs.run_all([(1, 0)], [STOCK, OURS], book, workers=1)
    assert ran[4:] == [Place(1, 0, 0, OURS, Flow(1.0, 10))]


def test_a_seed_that_something_was_chosen_on_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = tmp_path / "kept.jsonl"
    seed = min(int(each) for each in command.read_chosen() if each.isdecimal())
    records = [record | {"seed": seed, "number": 0} for record in make_found((10, 9, 5)).records]
    book.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    arguments = ["--seed", str(seed), "--count", "1", "--report", "--out", str(book)]
    monkeypatch.setattr("sys.argv", ["random_scenarios", *arguments])
    assert command.main() == 0
    assert f"Seed {seed} was used to choose something" in capsys.readouterr().out
    assert MATTERS > 1


def test_a_single_scenario_that_something_was_chosen_on_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen, book = tmp_path / "chosen_on.txt", tmp_path / "kept.jsonl"
    chosen.write_text("# SEED/NUMBER WHAT\n3/1 a rule\n")
    monkeypatch.setattr(command, "CHOSEN_ON", chosen)
    records = [record | {"seed": 3} for record in make_found((10, 9, 5), (10, 40, 5)).records]
    book.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["", *f"--seed 3 --count 2 --report --out {book}".split()])
    assert command.main() == 0
    shown = capsys.readouterr().out
    assert "Left out, because something was chosen on them: 3/1." in shown
    assert "Over 1 scenarios" in shown


def test_an_interval_is_a_setting_of_its_own() -> None:
    settings = runs.list_settings(["continuum/async"], [None, 512], [1, 4])
    assert settings.count(Setting("continuum/async")) == 1
    every_4th = Setting("continuum/async", None, 4)
    assert every_4th in settings and every_4th.label == "continuum, prefill every 4 steps"
    assert get_setup(draw_scenario(101, 3), every_4th)[0].prefill_schedule_interval == 4


def test_a_part_is_over_the_whole_and_no_rival() -> None:
    part = Setting("experiments.ablation:NoPrice")
    found = Found(
        [*make_found((10, 9, 5), (10, 9, 5)).records, make_record(0, part, 6), make_record(1, part, 5)]
    )
    assert part not in found.rivals
    assert "| NoPrice | 2 | 1.095" in format_report(found)


def test_runs_of_older_code_that_come_out_the_same_are_not_older(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decision_code, "SAME", tmp_path / "same.txt")
    decision_code._read_same.cache_clear()
    book = Book(tmp_path / "book.jsonl")
    flow = Flow(1.0, 2)
    record = runs.run_place(Place(5, 0, 0, STOCK, flow))
    present = Code.of(record)
    older = {**record, "code": f"before-{present.place}-{present.rules}"}
    append_lines(book.path, {"seed": 5, "number": 0, "rate": 1.0, "num_jobs": 2, "waits": 1.0}, older)
    assert not runs.is_present(older)

    wrong = Book(tmp_path / "wrong.jsonl")
    append_lines(
        wrong.path, {"seed": 5, "number": 0, "rate": 1.0, "num_jobs": 2, "waits": 1.0}, {**older, "jobs": 3}
    )
    assert command.confirm_kept(wrong, 1, 1) == 1
    assert "5/0, stock" in capsys.readouterr().out and not runs.is_present(older)

    assert command.confirm_kept(book, 1, 1) == 0
    assert runs.is_present(older)
    assert command.confirm_kept(book, 1, 1) == 0
    assert "No run is of older code." in capsys.readouterr().out

    elsewhere = Book(tmp_path / "elsewhere.jsonl")
    moved = {**record, "code": f"{present.engine}-elsewhere-{present.rules}"}
    append_lines(elsewhere.path, {"seed": 5, "number": 0, "rate": 1.0, "num_jobs": 2, "waits": 1.0}, moved)
    assert command.confirm_kept(elsewhere, 1, 1) == 0 and runs.is_present(moved)
    decision_code._read_same.cache_clear()


def test_late_first_tokens_are_counted_and_those_that_one_feels() -> None:
    records = []
    for number, (stock_s, own_s) in enumerate(((0.05, 0.1), (1.0, 1.25), (1.0, 1.05), (1.0, 2.0))):
        for setting, seconds in ((STOCK, stock_s), (OURS, own_s)):
            record = make_record(number, setting, 10)
            records.append({**record, "ttft_s": {"mean": seconds, "p95": seconds}})
    assert "| P95 TTFT | 4 | 3 | 2 | 2 | 1 |" in format_report(Found(records))


def test_a_rival_is_timely_if_first_tokens_come_hardly_later_than_in_stock() -> None:
    late, timely = Setting("continuum/async", 512), Setting("thunderagent/async", 512)
    records = [
        make_record(0, setting, mean, plain_ttft_s={"p95": p95})
        for setting, mean, p95 in ((STOCK, 10, 1.0), (OURS, 8, 1.0), (late, 5, 1.4), (timely, 9, 1.2))
    ]
    found = Found(records)
    assert (found.get_best((1, 0)), found.get_best_timely((1, 0))) == (late, timely)
    assert "| the best timely one in hindsight: mean job time | all | 0.889" in format_report(found)
    assert Found(records[:3]).get_best_timely((1, 0)) == STOCK


def test_first_tokens_of_people_are_not_mixed_with_those_of_agents_whose_job_has_one_turn() -> None:
    """8/8 has agents alone, some of one turn; in 8/5 others ask too."""
    kept = [run_place(Place(8, number, 0, STOCK, Flow(0.5, 60, 0.1))) for number in (8, 5)]
    assert [each["plain_ttft_s"] is not None for each in kept] == [True, True]
    assert kept[0]["asked_ttft_s"] is None
    assert kept[1]["asked_ttft_s"]["p95"] > 0
    records = [
        make_record(0, setting, 1.0, asked_ttft_s={"p95": p95})
        for setting, p95 in ((STOCK, 1.0), (OURS, 1.2))
    ]
    assert "without agents' jobs of one turn | 1 | 1 | 1 | 0 | 0 |" in format_report(Found(records))


def test_a_page_has_the_report_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"head\n{BEGIN}\nold\n{END}\ntail\n", encoding="utf-8")
    write_page(make_found((10, 9, 5)), page)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("head\n") and text.endswith("\ntail\n") and "old" not in text
    assert "### By kind of traffic" in text
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="has no"):
        write_page(make_found((10, 9, 5)), page)


def test_a_seed_that_something_was_chosen_on_is_not_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seed = min(int(each) for each in command.read_chosen() if each.isdecimal())
    monkeypatch.setattr(
        "sys.argv", ["", "--seed", str(seed), "--report", "--page", str(tmp_path / "page.md")]
    )
    with pytest.raises(SystemExit):
        command.main()
    assert "is never reported" in capsys.readouterr().err
