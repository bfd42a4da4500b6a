"""The plan of the benchmark: contestants and workloads as data."""

from __future__ import annotations

from dataclasses import dataclass, field

GUARANTEES = {
    "L0": "in the memory of a process: a crash of the broker loses it",
    "L0+": "in the page cache, but not always at once: kill -9 loses a few of the last jobs, a power cut up to 2 s",
    "L1": "in the page cache: survives kill -9, not a power cut",
    "L3": "synced to disk: survives a power cut",
}


@dataclass(frozen=True)
class Contestant:
    key: str
    name: str
    module: str | None  # in contestants/; the harness itself measures None
    server: str | None  # one of run.py's SERVERS
    guarantee: str  # level of a job whose enqueue call has returned
    note: str
    env: dict[str, str] = field(default_factory=dict)
    uses_packages: bool = False  # imports packages of the peers' environment into Penstock's own

    @property
    def is_penstock(self) -> bool:
        return self.key.startswith("penstock")


def on_redis(key: str, name: str, module: str, note: str) -> list[Contestant]:
    """Return a Redis peer twice: as most people run it, and at Penstock's level."""
    return [
        # While an fsync runs, `everysec` replies before it has written the command. So it is not L1: Redis 7.0 lost
        # 16 of 66,944 confirmed jobs in 14 runs that ended with kill -9. At `always` it lost none of 21,400 in 20.
        Contestant(f"{key}-everysec", f"{name}, Redis everysec", module, "redis-everysec", "L0+", note),
        Contestant(f"{key}-always", f"{name}, Redis always", module, "redis-always", "L3", note),
    ]


CONTESTANTS = [
    Contestant("penstock", "Penstock", "penstock_peer", None, "L3", "results at L3 too"),
    Contestant(
        "penstock-os", 'Penstock, durability="os"', "penstock_peer", None, "L1", "results at L3",
        {"BENCH_DURABILITY": "os"},
    ),
    Contestant("penstock-group", "Penstock, as a group", "penstock_peer", None, "L3", "", {"BENCH_PAGE": "group"}),
    Contestant("penstock-threads", "Penstock, threads", "penstock_peer", None, "L3", "", {"BENCH_KIND": "thread"}),
    Contestant(
        "penstock-threads-group", "Penstock, threads, as a group", "penstock_peer", None, "L3", "",
        {"BENCH_KIND": "thread", "BENCH_PAGE": "group"},
    ),
    Contestant("penstock-async", "Penstock, asyncio", "penstock_peer", None, "L3", "", {"BENCH_KIND": "async"}),
    Contestant(
        "penstock-isolated", "Penstock, isolated", "isolated_peer", None, "L3", "a process for each job, forked ahead",
        uses_packages=True,
    ),
    Contestant(
        "penstock-isolated-model", "Penstock, isolated, 200 MB more", "isolated_peer", None, "L3", "",
        {"BENCH_MODEL_MB": "200"}, uses_packages=True,
    ),
    Contestant("bare-fork", "bare fork of the same heap", "bare_fork_peer", None, "L0", "no queue; huge pages, too"),
    Contestant(
        "bare-fork-model", "bare fork, 200 MB more", "bare_fork_peer", None, "L0", "", {"BENCH_MODEL_MB": "200"}
    ),
    Contestant(
        "rq-imported", "RQ, app imported in the worker", "rq_peer", "redis-everysec", "L0+", "", {"BENCH_IMPORTED": "1"}
    ),
    Contestant("rq", "RQ", "rq_peer", "redis-everysec", "L0+", "each process imports the app"),
    Contestant("pool", "thread pool in the program", "pool_peer", None, "L0", "40 threads, no queue"),
    Contestant("bare-sync", "bare append + fdatasync", None, None, "L3", "300 B, preallocated: the disk's own limit"),
    Contestant(
        "celery", "Celery, RabbitMQ", "celery_peer", "rabbitmq", "L0",
        "its defaults: no publisher confirms, a job is acknowledged before it runs; results in Redis everysec (L0+)",
    ),
    Contestant(
        "celery-safe", "Celery, RabbitMQ, confirms", "celery_peer", "rabbitmq", "L3",
        "publisher confirms, late acknowledgement; results in Redis everysec (L0+)", {"BENCH_SAFE": "1"},
    ),
    Contestant(
        "celery-threads", "Celery, RabbitMQ, threads", "celery_peer", "rabbitmq", "L0", "", {"BENCH_KIND": "thread"}
    ),
    Contestant(
        "celery-gevent", "Celery, RabbitMQ, gevent", "celery_peer", "rabbitmq", "L0", "", {"BENCH_KIND": "async"}
    ),
    Contestant(
        "celery-group", "Celery, RabbitMQ, as a group", "celery_peer", "rabbitmq", "L0", "", {"BENCH_PAGE": "group"}
    ),
    Contestant(
        "celery-redis", "Celery, Redis everysec", "celery_peer", "redis-everysec", "L0+", "its defaults",
        {"BENCH_BROKER": "redis"},
    ),
    Contestant(
        "celery-redis-group", "Celery, Redis everysec, as a group", "celery_peer", "redis-everysec", "L0+", "",
        {"BENCH_BROKER": "redis", "BENCH_PAGE": "group"},
    ),
    *on_redis("dramatiq", "dramatiq", "dramatiq_peer", "8 threads a process, its default"),
    *on_redis("taskiq", "taskiq", "taskiq_peer", "stream broker, 32 jobs at once a process"),
    *on_redis("saq", "SAQ", "saq_peer", "32 jobs at once a process"),
    *on_redis("streaq", "streaQ", "streaq_peer", "32 jobs at once a process; result() takes 100 ms to unsubscribe"),
]  # fmt: skip
BY_KEY = {contestant.key: contestant for contestant in CONTESTANTS}
EVERYSEC = ["dramatiq-everysec", "taskiq-everysec", "saq-everysec", "streaq-everysec"]
ALWAYS = ["dramatiq-always", "taskiq-always", "saq-always", "streaq-always"]

Parameters = dict[str, float]


@dataclass(frozen=True)
class Figure:
    key: str
    title: str
    unit: str
    more_is_better: bool = True


@dataclass(frozen=True)
class Workload:
    """A function of client.py with its arguments: ``parameters`` for all contestants, ``own`` for one of them."""

    key: str
    title: str
    measurement: str
    figures: list[Figure]  # the first is the one that ratios compare
    contestants: list[str]
    parameters: Parameters
    quick: Parameters | None  # None leaves it out of a quick run
    own: dict[str, Parameters] = field(default_factory=dict)
    quick_contestants: list[str] | None = None

    def parameters_of(self, contestant: str, quick: bool) -> Parameters:
        chosen = dict(self.parameters)
        chosen.update(self.own.get(contestant, {}))
        if quick and self.quick is not None:
            # A quick run is never longer than the full one, for any contestant.
            chosen.update({key: min(value, chosen.get(key, value)) for key, value in self.quick.items()})
        return chosen

    def contestants_of(self, quick: bool) -> list[str]:
        if not quick:
            return self.contestants
        if self.quick is None:
            return []
        return self.contestants if self.quick_contestants is None else self.quick_contestants


OURS = ["penstock", "penstock-os"]
KINDS = ["penstock", "penstock-threads", "penstock-async"]
# Each contestant by plain calls, followed by the same as a group.
PAGES = [
    "penstock", "penstock-group", "penstock-threads", "penstock-threads-group", "penstock-async", "pool", "celery",
    "celery-group", "celery-redis", "celery-redis-group",
]  # fmt: skip
WORKFLOWS = ["penstock", "pool", "celery", "celery-redis"]
QUICK = ["penstock", "bare-sync", "celery", "dramatiq-everysec", "taskiq-everysec", "saq-everysec", "streaq-everysec"]
NO_LOOP = [key for key in QUICK if key != "bare-sync"]

WORKLOADS = [
    Workload(
        "no-op", "No-op jobs on 2 process slots, results kept", "drain",
        [
            Figure("drain_per_s", "drain, steady", "jobs/s"),
            Figure("end_to_end_per_s", "end to end", "jobs/s"),
            Figure("enqueue_per_s", "bulk enqueue", "jobs/s"),
        ],
        [*OURS, "celery", "celery-safe", *EVERYSEC, *ALWAYS],
        {"slots": 2, "count": 10_000}, {"count": 5_000},
        own={
            "penstock": {"count": 100_000}, "penstock-os": {"count": 100_000},
            "celery": {"count": 4_000}, "celery-safe": {"count": 4_000},
        },
        quick_contestants=NO_LOOP,
    ),
    Workload(
        "race", "The public test: 20,000 jobs, 10 workers, from the worker's start to the last result", "race",
        [
            Figure("finish_s", "finish", "s", more_is_better=False),
            Figure("enqueue_s", "enqueue", "s", more_is_better=False),
        ],
        ["penstock", "celery", *EVERYSEC],
        {"slots": 10, "count": 20_000}, None,
    ),
    Workload(
        "one", "delay() one at a time", "singly", [Figure("calls_per_s", "calls", "calls/s")],
        [*OURS, "bare-sync", "celery", "celery-safe", *EVERYSEC, *ALWAYS],
        {"callers": 1, "seconds": 1.5}, {"seconds": 1},
        quick_contestants=QUICK,
    ),
    Workload(
        "sixteen", "delay() from 16 threads (or asyncio tasks) at once", "singly",
        [Figure("calls_per_s", "calls", "calls/s")],
        [*OURS, "celery-safe", *ALWAYS],
        {"callers": 16, "seconds": 1.5}, {"seconds": 1},
        quick_contestants=["penstock"],
    ),
    Workload(
        "bulk", "Bulk enqueue of 400,000 jobs, one call", "bulk", [Figure("enqueue_per_s", "enqueue", "jobs/s")],
        OURS, {"count": 400_000}, {"count": 100_000},
        quick_contestants=["penstock"],
    ),
    Workload(
        "latency", "From the call to the result in hand, worker idle", "latency",
        [
            Figure("p50_ms", "p50", "ms", more_is_better=False),
            Figure("p99_ms", "p99", "ms", more_is_better=False),
        ],
        [*OURS, "celery", "celery-safe", *EVERYSEC, *ALWAYS],
        {"slots": 2, "count": 1_000}, {"count": 300},
        # Each takes 100 ms, and fewer samples show the same.
        own={"streaq-everysec": {"count": 50}, "streaq-always": {"count": 50}},
        quick_contestants=NO_LOOP,
    ),
    Workload(
        "memory-2", "Memory of the worker tree (PSS), 2 process slots", "memory",
        [Figure("pss_mb", "PSS", "MB", more_is_better=False)], ["penstock", "celery"], {"slots": 2}, {},
    ),
    Workload(
        "memory-40", "Memory of the worker tree (PSS), 40 process slots", "memory",
        [Figure("pss_mb", "PSS", "MB", more_is_better=False)], ["penstock", "celery"], {"slots": 40}, None,
    ),
    Workload(
        "waits", "Jobs that wait a second on 760 slots", "waits",
        [
            Figure("efficiency_percent", "slots in use", "%"),
            Figure("pss_mb", "PSS of the worker", "MB", more_is_better=False),
            Figure("slots", "slots", "in all"),
        ],
        [*KINDS, "celery", "celery-threads", "celery-gevent"], {"slots": 760, "waves": 6}, None,
        # More Celery processes need all the memory of a machine with 16 GB.
        own={"celery": {"slots": 100}},
    ),
    Workload(
        "fan-out-1", "A page of 155 jobs of 5 ms on 40 slots, 1 client", "fan_out",
        [Figure("page_ms", "the last page", "ms", more_is_better=False)],
        PAGES, {"slots": 40, "count": 155, "clients": 1, "rounds": 20}, None,
    ),
    Workload(
        "fan-out-16", "The same, 16 clients at once", "fan_out",
        [Figure("page_ms", "the last page", "ms", more_is_better=False)],
        PAGES, {"slots": 40, "count": 155, "clients": 16, "rounds": 20}, None,
        own={key: {"rounds": 5} for key in PAGES if key.startswith("celery")},
    ),
    Workload(
        "chord", "A chord of 10,000 no-ops on 2 process slots", "chord",
        [Figure("end_to_end_s", "end to end", "s", more_is_better=False)],
        WORKFLOWS, {"slots": 2, "count": 10_000, "rounds": 5}, {"count": 1_000, "rounds": 1},
        own={"pool": {"slots": 40}, "celery": {"rounds": 1}, "celery-redis": {"rounds": 1}},
        quick_contestants=["penstock", "celery"],
    ),
    Workload(
        "chain", "A chain of 1,000 no-ops on 2 process slots", "chain",
        [Figure("end_to_end_s", "end to end", "s", more_is_better=False)],
        WORKFLOWS, {"slots": 2, "count": 1_000, "rounds": 5}, {"count": 100, "rounds": 1},
        own={"pool": {"slots": 40}, "celery": {"rounds": 1}, "celery-redis": {"rounds": 1}},
        quick_contestants=["penstock", "celery"],
    ),
    Workload(
        "group", "A group of 1,000,000 no-ops on 2 process slots (the pool: 100,000, Celery: 10,000)", "group",
        [
            Figure("end_to_end_per_s", "end to end", "members/s"),
            Figure("end_to_end_s", "all of it", "s", more_is_better=False),
            Figure("send_s", "delay()", "s", more_is_better=False),
        ],
        WORKFLOWS, {"slots": 2, "count": 1_000_000, "rounds": 1}, {"count": 10_000, "rounds": 1},
        own={
            "pool": {"slots": 40, "count": 100_000}, "celery": {"count": 10_000, "rounds": 1},
            "celery-redis": {"count": 10_000, "rounds": 1},
        },
        quick_contestants=["penstock"],
    ),
    Workload(
        "mixed", "Two workers of 4 slots, six of them in jobs of 6 s: how long jobs of 1 ms wait", "mixed",
        [
            Figure("p50_ms", "p50", "ms", more_is_better=False),
            Figure("p99_ms", "p99", "ms", more_is_better=False),
            Figure("p999_ms", "p99.9", "ms", more_is_better=False),
        ],
        [*KINDS, "celery"], {"slots": 4, "count": 1_500}, None,
        own={"celery": {"count": 300}},
    ),
    Workload(
        "isolated", "A process for each job, of an app with 300 classes of SQLAlchemy's and pandas", "isolated",
        [
            Figure("jobs_per_s", "1,000 jobs, 4 slots", "jobs/s"),
            Figure("p50_ms", "one at a time, p50", "ms", more_is_better=False),
        ],
        ["penstock-isolated", "penstock-isolated-model", "bare-fork", "bare-fork-model", "rq-imported", "rq"],
        {"slots": 4, "count": 1_000, "trips": 100}, None,
        # RQ imports the app for each job, which takes seconds.
        own={"rq": {"count": 20, "trips": 3}},
    ),
    Workload(
        "in-turn", "The same jobs in turn with the bare loop, which forks, runs and reaps processes", "in_turn",
        [Figure("of_bare", "500 jobs, 4 slots", "of the bare loop's rate")],
        ["penstock-isolated", "penstock-isolated-model"],
        {"slots": 4, "count": 500, "turns": 6}, None,
    ),
]  # fmt: skip
