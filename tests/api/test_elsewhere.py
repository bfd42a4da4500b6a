"""Tasks of libraries, which have no app, and tasks whose code is in another program."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from project import Project

from penstock import App, ArgumentMismatch, shared_task
from penstock.testing import inline

LIBRARY = """
    from penstock import shared_task

    @shared_task(queue="mail", retries=2)
    def post(to: str, copies: int = 1) -> str:
        return f"{copies} to {to}"

    @shared_task
    async def fetch(url: str) -> int:
        return len(url)

    alias = post
"""


@pytest.fixture
def library(project: Project, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    project.write("mail_library.py", LIBRARY)
    monkeypatch.syspath_prepend(project.directory)
    monkeypatch.delitem(sys.modules, "mail_library", raising=False)
    import mail_library

    return mail_library


def test_a_shared_task_is_a_task_of_the_app_that_adds_it(library: ModuleType) -> None:
    assert library.post("ada") == "1 to ada"
    app = App("shop")
    post = app.add(library.post)
    assert app.tasks == {"mail_library.post": post}
    with inline(app) as calls:
        assert library.post.delay("ada", copies=2).result(timeout=30) == "2 to ada"
        assert library.post.options(priority=9).delay("bob").result(timeout=30) == "1 to bob"
        assert [job.result(timeout=30) for job in library.post.map(["a", "b"])] == ["1 to a", "1 to b"]
    assert calls[0].queue == "mail"
    assert post.retry_policy.retries == 2


def test_an_app_adds_all_shared_tasks_of_a_module(library: ModuleType) -> None:
    app = App("shop")
    assert sorted(task.name for task in app.add(library)) == ["mail_library.fetch", "mail_library.post"]
    with inline(app):
        assert library.fetch.delay("penstock:").result(timeout=30) == 9


def test_a_shared_task_without_an_app_says_how_it_gets_one(library: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"mail_library.post has no app yet: call app.add\(post\) first"):
        library.post.delay("ada")


def test_a_shared_task_of_two_apps_is_enqueued_through_one_of_them(library: ModuleType) -> None:
    shop, bank = App("shop"), App("bank")
    of_shop, of_bank = shop.add(library.post), bank.add(library.post)
    with pytest.raises(RuntimeError, match=r"added to several apps \('shop', 'bank'\)"):
        library.post.delay("ada")
    assert (of_shop.app, of_bank.app) == (shop, bank)
    with inline(bank):
        assert of_bank.delay("ada").result(timeout=30) == "1 to ada"


def test_what_is_no_shared_task_is_refused(library: ModuleType) -> None:
    app = App("shop")
    with pytest.raises(TypeError, match="takes a @shared_task or a module that has some"):
        app.add(len)
    with pytest.raises(ValueError, match="has no @shared_task at its top level"):
        app.add(sys)
    with pytest.raises(TypeError, match="a task must be a function"):
        shared_task(int)
    with pytest.raises(TypeError, match="unknown"):
        shared_task(colour="red")(lambda: None)  # type: ignore[call-overload]
    for name in ("", 3):
        with pytest.raises(TypeError, match=r"the name of a task must be a string such as 'shop.mail.post', not"):
            app.remote_task(name)  # type: ignore[arg-type]
    app.add(library.post)
    app.add(library.post)
    with pytest.raises(ValueError, match="two tasks are called"):
        app.task(name="mail_library.post")(lambda: None)


MAIL = """
    from penstock import App

    app = App("mail")

    @app.task(name="mail.post", queue="letters")
    def post(to: str, copies: int = 1) -> str:
        return f"{copies} to {to}"
"""


def test_a_task_of_another_program_is_enqueued_by_its_name(project: Project) -> None:
    project.write("mail.py", MAIL)
    project.worker("mail:app", "-c", "1")
    shop = App("shop")
    project.apps.append(shop)
    post = shop.remote_task("mail.post", queue="letters")
    assert post.delay("ada", copies=3).result(timeout=30) == "3 to ada"
    # For a task of the same app, the options of its decorator apply.
    shop.task(name="mail.post", queue="letters")(lambda to: to)
    assert shop.send("mail.post", "bob").result(timeout=30) == "1 to bob"


def test_arguments_that_a_remote_task_does_not_take_fail_the_job_at_once(project: Project) -> None:
    project.write("mail.py", MAIL)
    project.worker("mail:app", "-c", "1")
    shop = App("shop")
    project.apps.append(shop)
    job = shop.remote_task("mail.post", queue="letters").delay("ada", colour="red")
    with pytest.raises(ArgumentMismatch, match="unexpected keyword argument 'colour'"):
        job.result(timeout=30)


async def test_a_task_is_enqueued_by_its_name_from_an_event_loop() -> None:
    app = App("shop")
    app.task(name="shop.add")(lambda a, b: a + b)
    with inline(app):
        job = await app.asend("shop.add", 1, 2)
        assert await job == 3
