"""Apps that share a queue, and workers of different versions: a job goes only to a worker that has its task."""

from __future__ import annotations

import pytest
from project import Project, eventually

from penstock import ArgumentMismatch, JobState

APP = """
    from penstock import App

    app = App("{app}", url="{url}")

    @app.task
    def {task}(number: int) -> str:
        return f"{app} ran {task}({{number}})"
"""


def write_app(project: Project, module: str, app: str, task: str) -> None:
    project.write(f"{module}.py", APP.format(app=app, task=task, url=project.url))


def test_two_apps_share_a_queue_and_each_worker_runs_the_jobs_of_its_own(project: Project) -> None:
    for app, task in (("shop", "order"), ("mail", "post")):
        write_app(project, app, app, task)
    order = project.tasks("shop.py").order
    post = project.tasks("mail.py").post
    jobs = [task.delay(number) for number in range(200) for task in (order, post)]
    workers = [project.worker(f"{app}:app", "-c", "2") for app in ("shop", "mail")]
    results = [job.result(timeout=60) for job in jobs]
    expected = [text for number in range(200) for text in (f"shop ran order({number})", f"mail ran post({number})")]
    assert results == expected
    for worker in workers:
        assert "no worker of queue" not in worker.output


def test_workers_of_two_apps_that_have_a_task_of_one_name_are_told_of_it(project: Project) -> None:
    for app in ("shop", "mail"):
        project.write(
            f"{app}.py",
            f"""
            from penstock import App

            app = App("{app}", url="{project.url}")

            @app.task(name="clean")
            def clean() -> None: ...
            """,
        )
    first = project.worker("shop:app", "-c", "1")
    first.wait_for_output("queues: default")
    second = project.worker("mail:app", "-c", "1")
    for worker in (first, second):
        said = worker.wait_for_output("both have the task")
        assert 'the apps "mail" and "shop" both have the task "clean" in queue "default"' in said
        assert "rename the task in one of them" in said


def test_a_job_of_a_newer_version_waits_for_a_worker_of_it(project: Project) -> None:
    """During a rolling deployment the clients are already new, and one worker is still old."""
    write_app(project, "old", "shop", "order")
    write_app(project, "new", "shop", "refund")
    refund = project.tasks("new.py").refund
    old = project.worker("old:app", "-c", "1")
    old.wait_for_output("queues: default")
    job = refund.delay(7)
    said = old.wait_for_output("no worker of queue")
    assert 'no worker of queue "default" has the task "new.refund": 1 job waits' in said
    assert job.info().state == "waiting"
    project.worker("new:app", "-c", "1")
    assert job.result(timeout=60) == "shop ran refund(7)"
    assert job.info().attempts == 1


def test_a_burst_leaves_the_jobs_of_other_apps_where_they_are(project: Project) -> None:
    for app, task in (("shop", "order"), ("mail", "post")):
        write_app(project, app, app, task)
    order = project.tasks("shop.py").order
    post = project.tasks("mail.py").post
    posts = post.map(range(50))
    orders = order.map(range(50))
    burst = project.worker("shop:app", "-c", "2", "--burst")
    assert burst.wait(60) == 0, burst.output
    assert all(job.info().state == "succeeded" for job in orders)
    assert project.status()["queues"][0]["ready"] == len(posts)
    assert project.worker("mail:app", "-c", "2", "--burst").wait(60) == 0
    assert [job.result(timeout=30) for job in posts] == [f"mail ran post({number})" for number in range(50)]


def test_one_worker_runs_the_jobs_of_several_apps(project: Project) -> None:
    hook = """
    @app.on_process_start
    def begin() -> None:
        print("{app} begins")
    """
    for app, task in (("shop", "order"), ("mail", "post")):
        project.write(f"{app}.py", APP.format(app=app, task=task, url=project.url) + hook.format(app=app))
    order = project.tasks("shop.py").order
    post = project.tasks("mail.py").post
    jobs = [order.delay(1), post.delay(2)]
    worker = project.penstock("worker", "shop:app", "mail", "-c", "1", "--burst")
    assert worker.returncode == 0, worker.output
    assert [job.result(timeout=30) for job in jobs] == ["shop ran order(1)", "mail ran post(2)"]
    assert "has loaded shop:app, mail:app: 2 tasks from mail (1), shop (1)" in worker.output
    assert "shop begins" in worker.output and "mail begins" in worker.output


def test_apps_that_can_not_share_a_worker_are_told_apart_at_its_start(project: Project) -> None:
    write_app(project, "shop", "shop", "order")
    write_app(project, "mail", "mail", "post")
    write_app(project, "also", "also", "post")
    project.write("far.py", APP.format(app="far", task="go", url="tcp://127.0.0.1:9"))
    project.write(
        "also.py", (project.directory / "also.py").read_text().replace("@app.task", '@app.task(name="mail.post")')
    )
    for apps, reason in {
        ("mail:app", "also:app"): "mail:app and also:app both have a task 'mail.post'",
        ("shop:app", "far:app"): f"have different brokers ({project.url} and tcp://127.0.0.1:9)",
        ("shop:app", "nothing:app"): "there is no module 'nothing'",
    }.items():
        worker = project.penstock("worker", *apps)
        assert worker.returncode == 3
        assert reason in worker.output


VERSIONS = """
    from penstock import App
    from penstock._worker import runner

    # The default is half a minute.
    runner._DEFERRED_FOR_S = 0.05
    app = App("shop", url="{url}", version_grace={grace})

    @app.task(name="shop.order")
    def order({parameters}) -> str:
        return f"{{number}} {{colour}}"
"""


def write_version(project: Project, module: str, parameters: str, grace: int = 600) -> None:
    project.write(f"{module}.py", VERSIONS.format(url=project.url, parameters=parameters, grace=grace))


def test_a_job_of_a_new_version_is_not_failed_by_an_old_worker_of_its_task(project: Project) -> None:
    write_version(project, "old", "number: int, colour: str = 'red'")
    write_version(project, "new", "number: int, colour: str = 'red', size: int = 1")
    order = project.tasks("new.py").order
    old = project.worker("old:app", "-c", "1")
    # The old worker runs calls that fit its version.
    assert order.delay(1, colour="blue").result(timeout=30) == "1 blue"
    job = order.delay(2, size=40)
    old.wait_for_output("was enqueued by another version of the task")
    eventually(lambda: len(job.info().errors) >= 2)
    assert {error.attempt for error in job.info().errors} == {1}
    old.end()
    project.worker("new:app", "-c", "1")
    assert job.result(timeout=30) == "2 red"
    info = job.info()
    assert info.state is JobState.SUCCEEDED
    assert info.errors[0].type_name == "penstock.ArgumentMismatch"


def test_a_job_of_another_version_fails_once_the_grace_is_over(project: Project) -> None:
    write_version(project, "old", "number: int, colour: str = 'red'", grace=0)
    write_version(project, "new", "number: int, colour: str = 'red', size: int = 1")
    project.worker("old:app", "-c", "1")
    job = project.tasks("new.py").order.delay(2, size=40)
    with pytest.raises(ArgumentMismatch, match=r"do not fit this version of the task: .*'size'"):
        job.result(timeout=30)
    assert len(job.info().errors) == 1
