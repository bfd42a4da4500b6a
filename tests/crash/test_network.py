"""A bad network between clients, workers and a server: they recover automatically, and every call returns in time."""

from __future__ import annotations

import time

import pytest
from crash.cycles import Cycles
from crash.proxy import Proxy, Weather
from crash.storm import Storm, free_port, kill_at_once
from project import Project, eventually

DELAY = Weather(delay_s=0.3)
LONG_DELAY = Weather(delay_s=5)
DRIBBLE = Weather(dribbles=True)
HALF_OPEN = Weather(swallows=("back",))
DEAF = Weather(swallows=("there",))
BLACK_HOLE = Weather(swallows=("there", "back"))
REFUSES = Weather(refuses=True)
ALL = [DELAY, DRIBBLE, HALF_OPEN, DEAF, BLACK_HOLE, REFUSES, LONG_DELAY]


@pytest.mark.timeout(7200)
def test_a_bad_network_loses_and_doubles_nothing(cycles: Cycles) -> None:
    for number, times in enumerate(cycles.rounds(8, 500, each=25)):
        chance = cycles.chance(number)
        port = free_port()
        with Project.fresh() as project, Proxy(("127.0.0.1", port), chance) as proxy:
            storm = Storm(project, chance, f"tcp://127.0.0.1:{port}", through=f"tcp://127.0.0.1:{proxy.port}")
            storm.begin()
            for _ in range(times):
                storm.wait_for_confirms(10)
                proxy.weather = chance.choice(ALL)
                if chance.random() < 0.5:
                    proxy.cut()
                time.sleep(chance.uniform(0, 1))
                proxy.weather = Weather()
                # A restored route may reset connections that it no longer knows, or stay silent.
                proxy.cut(only_hit=not cycles.long or chance.random() < 0.8)
            verdict = storm.end()
            cycles.report(f"{times} spells of bad network; {verdict}")
            assert verdict.failed_calls == 0
            kill_at_once([storm.server().pid])


@pytest.mark.parametrize(
    "weather",
    [HALF_OPEN, DEAF, BLACK_HOLE, REFUSES, LONG_DELAY],
    ids=["half-open", "deaf", "black hole", "resets", "delays"],
)
def test_every_call_ends_in_time_whatever_the_network_does(project: Project, weather: Weather, cycles: Cycles) -> None:
    project.write(
        "tasks.py",
        """
        import sys, time
        from penstock import App, BrokerUnavailable, CallTimeout

        app = App("network", call_timeout=1)

        @app.task
        def work() -> None: ...

        def call() -> None:
            begun = time.monotonic()
            try:
                work.delay()
                print("accepted", flush=True)
            except (BrokerUnavailable, CallTimeout) as error:
                took = time.monotonic() - begun
                # The next thing that would end it is the heartbeat, after fifteen seconds.
                assert took < 12, took
                print("in time:", type(error).__name__, error.maybe_accepted, error, flush=True)
        """,
    )
    port = free_port()
    server = project.start(
        "penstock", "server", "--listen", f"tcp://127.0.0.1:{port}", "--data", project.directory / "d"
    )
    server.wait_for_output("listening")
    with Proxy(("127.0.0.1", port), cycles.chance()) as proxy:
        script = "import sys, tasks\ntasks.call()\nfor line in sys.stdin:\n    tasks.call()\n"
        client = project.start_python(script, stdin=True, PENSTOCK_URL=f"tcp://127.0.0.1:{proxy.port}")
        client.wait_for_output("accepted")
        proxy.weather = weather
        if weather.refuses:
            proxy.cut()
        client.write("call\n")
        client.wait_for_output("in time:" if weather != LONG_DELAY else "\n")
        proxy.weather = Weather()
        proxy.cut()
        # It recovers without help.
        accepted = client.output.count("accepted")
        for _ in range(60):
            ended = client.output.count("\n")
            client.write("call\n")
            eventually(lambda: client.output.count("\n") > ended, 60, lambda: client.output)  # noqa: B023
            if client.output.count("accepted") > accepted:
                break
        assert client.output.count("accepted") > accepted, client.output
        client.close_input()
        assert client.wait() == 0, client.output
    kill_at_once([server.pid])
