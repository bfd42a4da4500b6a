"""docs/django.md in a real project: a committed transaction enqueues its jobs, a rolled-back one none."""

from __future__ import annotations

from pathlib import Path

from blocks import ROOT, blocks

import penstock
from penstock import App

SETTINGS = """
    from pathlib import Path

    SECRET_KEY = "only for this test"
    INSTALLED_APPS = ["shop"]
    DATABASES = {
        "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).with_name("db.sqlite3")}
    }
    DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
    ALLOWED_HOSTS = ["*"]
    ROOT_URLCONF = "shop.urls"
    USE_TZ = True
"""

MODELS = """
    from django.db import models

    class Order(models.Model):
        address = models.CharField(max_length=100)
"""

URLS = """
    from django.urls import path
    from shop.views import buy

    urlpatterns = [path("buy", buy)]
"""

REQUESTS = """
    import django
    django.setup()

    from django.core.management import call_command
    from django.db import transaction
    from django.test import Client

    call_command("migrate", run_syncdb=True, verbosity=0)
    assert Client().get("/buy?to=ada@example.org").status_code == 202

    try:
        with transaction.atomic():
            assert Client().get("/buy?to=bob@example.org").status_code == 202
            raise KeyError("rolled back")
    except KeyError:
        pass
"""

WITHOUT_A_BROKER = """
    import logging
    import django
    django.setup()
    # Without DEBUG, Django's own handlers only send mail.
    logging.basicConfig()

    from django.core.management import call_command
    from django.test import Client
    from shop.models import Order

    call_command("migrate", run_syncdb=True, verbosity=0)
    assert Client().get("/buy?to=ada@example.org").status_code == 202
    assert Order.objects.count() == 1
"""


CONNECTIONS = """
    import django
    from django.db import connection

    django.setup()

    from shop.tasks import app


    @app.task(name="shop.use_database")
    def use_database() -> bool:
        was_open = connection.connection is not None
        connection.ensure_connection()
        return was_open
"""


def write_project(project):
    for block in blocks(ROOT / "docs" / "django.md", "python"):
        assert block.file is not None
        project.write(block.file, block.text)
    for name, source in {"settings": SETTINGS, "models": MODELS, "urls": URLS, "__init__": ""}.items():
        project.write(f"shop/{name}.py", source)
    project.write("manage.py", "")


def test_the_page_works_as_it_says(project):
    write_project(project)
    settings = {"DJANGO_SETTINGS_MODULE": "shop.settings", "PENSTOCK_URL": "local:.penstock"}
    project.python(REQUESTS, **settings)
    waiting = {queue["name"]: queue["ready"] for queue in project.status()["queues"]}
    assert waiting == {"default": 1}

    worker = project.worker("shop.worker:app", "--burst", PENSTOCK_URL="local:.penstock")
    assert worker.wait(60) == 0, worker.output
    assert "WARN" not in worker.output
    assert project.status()["queues"][0]["ready"] == 0
    assert Path(project.directory, "shop", "db.sqlite3").exists()


def test_a_request_does_not_fail_because_no_broker_answers(project):
    write_project(project)
    nobody = f"unix:{project.directory}/nobody.sock"
    output = project.python(WITHOUT_A_BROKER, DJANGO_SETTINGS_MODULE="shop.settings", PENSTOCK_URL=nobody)
    assert "ERROR:django.db.backends.base:" in output and "BrokerUnavailable" in output, output


def test_a_worker_whose_django_is_not_set_up_says_so(project):
    write_project(project)
    worker = project.worker("shop.tasks:app", "--burst")
    assert worker.wait(60) == 0, worker.output
    assert "WARN Django is imported and not set up, so models can't be used." in worker.output


def test_no_connection_outlives_the_job_that_opened_it(project):
    write_project(project)
    project.write("shop/connections.py", CONNECTIONS)
    project.worker("shop.connections:app", "-c", "1", DJANGO_SETTINGS_MODULE="shop.settings")
    use = App("shop").task(name="shop.use_database")(lambda: None)
    assert penstock.results([use.delay(), use.delay()], timeout=30) == [False, False]


def test_its_tests_pass_in_djangos_runner(project):
    write_project(project)
    output = project.python(
        """
        import django
        django.setup()

        from django.core.management import call_command

        call_command("test", "shop", verbosity=2)
        """,
        DJANGO_SETTINGS_MODULE="shop.settings",
    )
    assert "Ran 2 tests" in output
    assert "OK" in output
    # Nothing started a broker for them.
    assert not project.data.exists()
