"""`tenuto record`: runs a proxy with the given options until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys

from aiohttp import web

from tenuto.core.errors import ConfigError
from tenuto.proxy.file import RecordingFile
from tenuto.proxy.options import RecordOptions
from tenuto.proxy.proxy import MAX_HEADER_BYTES, Proxy
from tenuto.proxy.recorder import Recorder

GRACE_S = 30.0
"""Time limit in seconds for answers in flight when the recording ends. A second signal ends them at once."""
SWITCH_S = 0.0005
"""How many seconds the recorder's thread may hold the interpreter while the proxy waits. Python's default of
5 ms causes noticeable delays."""


def run_recording(options: RecordOptions) -> int:
    """Record until SIGINT or SIGTERM. Return the exit status: 1 if not everything was written."""
    sys.setswitchinterval(SWITCH_S)
    file = RecordingFile(options.out)
    recorder = Recorder(options, file, say)
    try:
        asyncio.run(serve(options, recorder))
    except KeyboardInterrupt:
        say("answers under way were cut")
    finally:
        recorder.close()
        file.close()
    lost = recorder.num_lost + file.num_lost
    say(
        f"{recorder.num_turns} turns in {options.out}, {recorder.num_failed} requests without a whole answer"
        + (f", {lost} lost" if lost else "")
    )
    return 1 if lost else 0


async def serve(options: RecordOptions, recorder: Recorder) -> None:
    """Serve the proxy until a signal arrives. Raises ConfigError if it cannot listen on its port."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        # The next signal has its default effect: it ends the process.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        ended.set()

    async with Proxy(
        options.upstream, recorder.submit, ask_usage=options.ask_usage, name_jobs=options.name_jobs
    ) as proxy:
        runner = web.AppRunner(
            proxy.make_app(),
            access_log=None,
            handler_cancellation=True,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            shutdown_timeout=GRACE_S,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, options.host, options.port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; try --port"
            ) from error
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end)
        host, port, *_ = runner.addresses[0]
        say(f"http://{host}:{port} passes to {options.upstream}; turns go to {options.out}; Ctrl-C ends")
        await ended.wait()
        await runner.cleanup()


def say(text: str) -> None:
    """Print a message for the user."""
    print(f"[record] {text}", file=sys.stderr, flush=True)
