"""The files in docs/deployment.md are accepted by the programs that read them."""

from __future__ import annotations

import re
import shutil

import pytest
import yaml
from blocks import ROOT, Block, blocks
from project import PROGRAM, Project, needs

PAGE = ROOT / "docs" / "deployment.md"


def name(block: Block) -> str:
    return block.text.splitlines()[0].removeprefix("# ")


@pytest.mark.parametrize("block", blocks(PAGE, "ini"), ids=name)
def test_a_unit_is_one_that_systemd_accepts(project: Project, block: Block):
    needs(shutil.which("systemd-analyze"), "systemd-analyze (Debian: systemd)")
    # The unit's program and user exist only on a deployed machine.
    unit = re.sub(r"^ExecStart=\S+", f"ExecStart={PROGRAM}", block.text, flags=re.MULTILINE)
    unit = re.sub(r"^(User|WorkingDirectory)=.*\n", "", unit, flags=re.MULTILINE)
    path = project.write(name(block).rsplit("/", 1)[1], unit)
    run = project.run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path)
    assert run.returncode == 0 and path.name not in run.output, run.output


def documents(file: str) -> list[dict]:
    (text,) = [block.text for block in blocks(PAGE, "yaml") if name(block) == file]
    return list(yaml.safe_load_all(text))


def test_a_worker_of_compose_and_of_kubernetes_has_more_time_to_stop_than_its_jobs(project: Project):
    grace = re.search(r"--grace <SECONDS>.*?\[default: (\d+)\]", project.penstock("worker", "--help").output, re.DOTALL)
    assert grace is not None
    (compose,) = documents("compose.yaml")
    assert int(compose["services"]["worker"]["stop_grace_period"].removesuffix("s")) > int(grace[1])
    (worker,) = [each for each in documents("penstock.yaml") if each["kind"] == "Deployment"]
    assert worker["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > int(grace[1])


def test_data_is_on_a_volume_and_the_broker_is_where_clients_look():
    (compose,) = documents("compose.yaml")
    broker = compose["services"]["broker"]
    (volume,) = broker["volumes"]
    assert broker["command"][-1] == volume.split(":")[1] and volume.split(":")[0] in compose["volumes"]
    for service in compose["services"].values():
        assert service["environment"]["PENSTOCK_URL"] == "tcp://broker:5670"

    kinds = {each["kind"]: each for each in documents("penstock.yaml")}
    stateful = kinds["StatefulSet"]["spec"]
    (broker,) = stateful["template"]["spec"]["containers"]
    (mount,) = broker["volumeMounts"]
    assert stateful["replicas"] == 1
    assert broker["command"][-1].startswith(mount["mountPath"])
    assert mount["name"] == stateful["volumeClaimTemplates"][0]["metadata"]["name"]
    service = f"tcp://{kinds['Service']['metadata']['name']}:{kinds['Service']['spec']['ports'][0]['port']}"
    for pod in (stateful, kinds["Deployment"]["spec"]):
        (container,) = pod["template"]["spec"]["containers"]
        assert {each["name"]: each.get("value") for each in container["env"]}["PENSTOCK_URL"] == service
        assert pod["selector"]["matchLabels"] == pod["template"]["metadata"]["labels"]


def test_the_image_s_files_and_user_are_those_that_it_says():
    (text,) = [block.text for block in blocks(PAGE, "dockerfile")]
    lines = re.sub(r"\\\n", "", text).splitlines()
    assert {line.split()[0] for line in lines} == {"FROM", "COPY", "RUN", "WORKDIR", "USER", "CMD"}
    (user,) = re.findall(r"^USER (\w+)", text, re.MULTILINE)
    assert f"--owner {user} " in text and "useradd" in text
