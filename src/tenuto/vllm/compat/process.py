"""vLLM's internals for its processes: the engine (waking it, its rank) and the API servers that call it.

API servers import this module. It imports vLLM only when it is used.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

HARMLESS_CALLS = frozenset({
    "check_health", "checkpoint_prepare", "checkpoint_restore", "compute_weight_checksums",
    "execute_dummy_batch", "get_model_inspection", "init_weight_transfer_engine", "list_loras", "profile",
    "release_late_interaction_query_cache", "report_memory_stats", "save_sharded_state",
    "save_tensorized_model", "shutdown_weight_transfer_engine", "synchronize_device", "update_max_model_len",
})  # fmt: skip
"""Worker methods that change no weights. Any other may, because operators can call any worker method."""


def find_engine_core() -> Any | None:
    """The EngineCore that is constructing the scheduler right now, found on the call stack.

    vLLM gives the scheduler no way to wake a sleeping engine. Through the EngineCore, Tenuto can wake an idle
    engine when a lease passes its deadline. None outside an engine, as in tests without workers.
    """
    from vllm.v1.engine.core import EngineCore

    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCore):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


def offer_call(engine_core: Any, name: str, call: Callable[[str], str]) -> None:
    """Let an API server call a function in this engine's process; see `call_engines`.

    The API servers of vLLM call methods of the EngineCore by name (`EngineCoreRequestType.UTILITY`). vLLM
    runs them between two steps, in the scheduler's thread.
    """
    setattr(engine_core, name, call)


def watch_weights(
    engine_core: Any,
    changed: Callable[[str], None],
    load_adapter: Callable[[str, str, Callable[[], bool]], bool],
) -> None:
    """Call `changed(what)` after each outside call that may have changed the model's weights.

    vLLM's weight updates and all other worker calls of an operator go through `collective_rpc`. LoRA adapters
    are loaded by `load_adapter(name, path, load)`, where `load` is vLLM's own loading.
    """
    call, add, sleep = engine_core.collective_rpc, engine_core.add_lora, engine_core.sleep

    # vLLM decodes arguments by their annotations, so each wrapper has the signature of the original.
    @functools.wraps(call)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(method, *args, **kwargs)
        finally:
            if method not in HARMLESS_CALLS:
                changed(method if isinstance(method, str) else "a function")

    @functools.wraps(add)
    def add_lora(lora_request: Any) -> bool:
        return load_adapter(lora_request.lora_name, lora_request.lora_path, lambda: bool(add(lora_request)))

    @functools.wraps(sleep)
    def sleep_and_report(level: int = 1, *args: Any, **kwargs: Any) -> Any:
        done = sleep(level, *args, **kwargs)
        if level > 1:
            changed("sleep")
        return done

    engine_core.collective_rpc, engine_core.add_lora = collective_rpc, add_lora
    engine_core.sleep = sleep_and_report


def get_ranks(client: Any) -> list[int]:
    """The data-parallel ranks of the engines that this API server knows."""
    return list(client.engine_core.engine_ranks_managed)


async def call_engines(
    client: Any, name: str, text: str, limit_s: float, ranks: Collection[int] | None = None
) -> dict[int, str | Exception]:
    """Call an offered function in the engines of some ranks, by default of all that this API server knows.

    `client`: the server's AsyncLLM. Returns the answers by rank, none if the client cannot call engines. If
    an engine does not answer within the limit, its answer is a TimeoutError.
    """
    core: Any = getattr(client, "engine_core", None)
    needed = ("_call_utility_async", "core_engines", "engine_ranks_managed")
    if not all(hasattr(core, each) for each in needed):
        return {}
    engines = {
        rank: engine
        for rank, engine in zip(core.engine_ranks_managed, core.core_engines, strict=True)
        if ranks is None or rank in ranks
    }

    async def call(engine: Any) -> str:
        return str(await asyncio.wait_for(core._call_utility_async(name, text, engine=engine), limit_s))

    answers = await asyncio.gather(*map(call, engines.values()), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, Exception):
            raise answer
    return dict(zip(engines, answers, strict=True))


def watch_requests(client: Any, change: Callable[[Any], None]) -> bool:
    """Let a function change the sampling parameters of every request that leaves for an engine.

    `client`: the server's AsyncLLM. vLLM sends requests of all paths with
    `EngineCoreClient.add_request_async`, in the context of the request. Returns False if the client lacks
    this method.
    """
    core = getattr(client, "engine_core", None)
    send = getattr(core, "add_request_async", None)
    if core is None or send is None:
        return False

    async def change_and_send(request: Any) -> None:
        if request.sampling_params is not None:
            change(request.sampling_params)
        await send(request)

    core.add_request_async = change_and_send
    return True


def get_dp_size(client: Any) -> int:
    """Number of data-parallel ranks of the deployment; some may belong to other API servers."""
    return int(client.vllm_config.parallel_config.data_parallel_size)


def wake(engine_core: Any) -> None:
    """Make a sleeping engine call `has_requests` again; does nothing for an in-process engine."""
    from vllm.v1.engine import EngineCoreRequestType

    queue = getattr(engine_core, "input_queue", None)
    if queue is not None:
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def get_engine_index(engine_core: Any) -> int:
    """The data-parallel rank that labels this engine's metrics."""
    return int(getattr(engine_core, "engine_index", 0))


def get_engine_client(scope: Mapping[str, Any]) -> Any | None:
    """The AsyncLLM of the API server that received an ASGI request; None if it has none."""
    return getattr(getattr(scope.get("app"), "state", None), "engine_client", None)


def get_own_config(client: Any) -> tuple[Any, bool] | None:
    """The additional config of the engines behind an AsyncLLM, and whether they have Tenuto's host memory.

    None if vLLM's own scheduler runs there, or if the client does not tell.
    """
    config = getattr(client, "vllm_config", None)
    if config is None or "tenuto" not in str(config.scheduler_config.scheduler_cls):
        return None
    transfer = config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    return config.additional_config, str(extra.get("spec_module_path")).startswith("tenuto.")


_KEY_CHECK = "AuthenticationMiddleware"


def has_key_check(scope: Mapping[str, Any]) -> bool:
    """Whether vLLM checks API keys in the API server that received an ASGI request."""
    added = getattr(scope.get("app"), "user_middleware", ())
    return any(getattr(getattr(each, "cls", None), "__name__", "") == _KEY_CHECK for each in added)


def find_key_check(app: Any) -> Callable[[str], bool] | None:
    """VLLM's function that checks the `authorization` header; None if no middleware below `app` has it."""
    while app is not None and type(app).__name__ != _KEY_CHECK:
        app = getattr(app, "app", None)
    if app is None:
        return None

    def check(authorization: str) -> bool:
        from starlette.datastructures import Headers

        return bool(app.verify_token(Headers({"authorization": authorization})))

    return check
