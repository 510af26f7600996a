"""The examples of docs/launching are what their launchers read: shell that parses, YAML with the fields that matter."""

import subprocess
from pathlib import Path

import pytest
import yaml

from spawnsim.cli.columnar import Columnar
from spawnsim.cli.declaring import parser_of
from spawnsim.cli.run import RunCommand

LAUNCHING = Path(__file__).parents[2] / "docs" / "launching"


@pytest.mark.parametrize("name", ["slurm.sbatch", "columns.sbatch"])
def test_the_batch_script_parses(name):
    """`bash -n` finds no fault, and all options stand before the first command, where Slurm reads them."""
    script = LAUNCHING / name
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    lines = [line for line in script.read_text().splitlines() if line]
    options = [place for place, line in enumerate(lines) if line.startswith("#SBATCH")]
    commands = [place for place, line in enumerate(lines) if not line.startswith("#")]
    assert options and max(options) < min(commands)


@pytest.mark.parametrize("name", ["mpijob.yaml", "torchrun.yaml"])
def test_kubernetes_examples_are_whole(name):
    """Each document has what the API server asks for first, and volumes that are mounted are declared."""
    for document in yaml.safe_load_all((LAUNCHING / name).read_text()):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)
        for pod in pods(document["spec"]):
            declared = {volume["name"] for volume in pod.get("volumes", ())}
            mounted = {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", ())}
            assert mounted <= declared


def pods(node):
    """Yield the pod specifications below a node."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def test_the_job_over_columns_may_be_submitted_again():
    """Its command is one that spawnsim takes, saves models, and continues."""
    last = (LAUNCHING / "columns.sbatch").read_text().splitlines()[-1]
    options = parser_of(Columnar).parse_args(last.split("spawnsim columnar ")[1].split())
    assert options.resume
    assert "checkpoint_every=50" in options.set
    assert options.train.name == "learn.py"


def test_the_commands_are_ones_that_spawnsim_takes():
    """What stands behind `spawnsim run` parses as a command line of spawnsim."""
    last = (LAUNCHING / "slurm.sbatch").read_text().splitlines()[-1]
    batch = last.split("spawnsim run ")[1].split()
    documents = [*yaml.safe_load_all((LAUNCHING / "mpijob.yaml").read_text())]
    documents += yaml.safe_load_all((LAUNCHING / "torchrun.yaml").read_text())
    commands = [
        each["command"]
        for one in documents
        for pod in pods(one["spec"])
        for each in pod["containers"]
        if "command" in each
    ]
    lines = [batch, *(words[words.index("run") + 1 :] for words in commands)]
    for words in lines:
        options = RunCommand.parse(words)
        assert (options.file.name, options.arguments) == ("train.py", [])
        assert options.backend in ("mpi", "torch")
    assert len(lines) == 3
