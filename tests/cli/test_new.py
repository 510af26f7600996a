"""`spawnsim new`, `spawnsim completion`, and the help of every command."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spawnsim import cli
from spawnsim.cli import COMMANDS, command_of, listing
from spawnsim.cli.declaring import parser_of
from spawnsim.run import Run

LINT = ("--isolated", "--line-length", "110")
RULES = ("--select", "E,W,F,I,N,UP,B,C4,D,PIE,RET,SIM,RUF", "--ignore", "D107")
GOOGLE = ("--config", "lint.pydocstyle.convention='google'")


# ---------------------------------------------------------------------------------------------------------- new
@pytest.mark.parametrize("kind", listing.KINDS)
def test_what_is_written_runs_at_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 12 virtual ranks, and with stragglers; what it learns becomes better."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", kind, "my_first"]) == 0
    run = "run my_first.py --ranks 12 --straggler lognormal:0.3 --out runs/a --quiet"
    assert cli.main(run.split()) == 0
    done = Run.load("runs/a")
    if kind == "torchrun":  # it records nothing, and prints its loss
        assert done.totals["messages"] > 100
        return
    # What the policy's program is about is how near the models are to each other.
    spread = done.table["weight" if kind == "policy" else "loss"].reshape(12, -1).std(axis=0)
    assert spread[-1] < 0.5 * spread[0]
    assert done.table["averaged_this_iteration"].sum() >= 12
    if kind == "study":
        assert cli.main(["study", "my_first.py", "--quick", "--jobs", "0", "--out", "runs/b"]) == 0
        assert sorted(each.name for each in Path("runs/b").glob("*.p*")) == ["loss.pdf", "loss.png"]


def test_what_is_written_is_clean(tmp_path: Path) -> None:
    """By ruff's rules and format; a policy's class has the file's name."""
    for kind in listing.KINDS:
        assert cli.main(["new", kind, str(tmp_path / f"{kind}_of_mine")]) == 0
    for line in (["check", *LINT, *RULES, *GOOGLE], ["format", *LINT, "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *line, "."], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
    text = (tmp_path / "policy_of_mine.py").read_text()
    assert "class PolicyOfMinePolicy(SpawnPolicy):" in text
    assert "class WorkloadOfMine:" in (tmp_path / "workload_of_mine.py").read_text()
    assert "__" not in re.sub(r"__init__", "", text)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor written where it could not be imported, or where no folder is."""
    (tmp_path / "mine.py").write_text("x = 1\n")
    refused = {
        "mine": "exists and is not overwritten",
        "mine.py": "exists and is not overwritten",
        "my-policy": "give a name that Python can import",
        "class": "give a name that Python can import",
        "nowhere/mine": "does not exist",
        "json": "would hide the module json from programs next to it",
    }
    for name, said in refused.items():
        assert cli.main(["new", "policy", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
    assert (tmp_path / "mine.py").read_text() == "x = 1\n"
    assert [each.name for each in tmp_path.iterdir()] == ["mine.py"]


# --------------------------------------------------------------------------------------------------- completion
def completed(script: Path, line: str) -> list[str]:
    """Return what bash offers at the end of a line."""
    words = line.split(" ")
    asked = f"""
        source {shlex.quote(str(script))}
        COMP_WORDS=({" ".join(map(shlex.quote, words))}) COMP_CWORD={len(words) - 1}
        COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)}
        name=$(complete -p spawnsim | sed -E "s/.*-F ([^ ]+).*/\\1/")
        "$name" spawnsim
        printf "%s\\n" "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=60)
    return sorted(word.strip() for word in done.stdout.split("\n") if word.strip())


def test_bash_completes_commands_options_and_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked as bash asks; also values of options, and names of studies and platforms."""
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    script = tmp_path / "spawnsim.bash"
    script.write_text(capsys.readouterr().out)
    assert completed(script, "spawnsim co") == ["columnar", "completion"]
    assert set(completed(script, "spawnsim ")) >= set(COMMANDS)
    assert completed(script, "spawnsim resume --rec") == ["--record-every", "--record-ranks"]
    assert completed(script, "spawnsim resume --o") == ["--observe"]
    with pytest.raises(SystemExit):
        cli.main(["completion", "--help"])
    place = "~/.local/share/bash-completion/completions/spawnsim"
    assert place in capsys.readouterr().out
    assert f"# Write it to {place}: bash" in script.read_text().splitlines()[1]
    assert "bash_completion/" not in script.read_text()
    assert completed(script, "spawnsim run --rec") == ["--record-every", "--record-ranks"]
    assert completed(script, "spawnsim run train.py --backend ") == ["mpi", "torch", "virtual"]
    assert "ethernet-10g" in completed(script, "spawnsim run train.py --platform e")
    assert completed(script, "spawnsim run train.py --observe t") == ["tensorboard"]
    assert "convergence" in completed(script, "spawnsim study conv")
    assert completed(script, "spawnsim new p") == ["policy", "program"]
    assert completed(script, "spawnsim columnar s") == ["selective", "sparta", "streaming"]
    assert completed(script, "spawnsim list wo") == ["workloads"]
    assert " -o default -F " in script.read_text()  # or no file would be offered where names are known


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_accepts_its_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell that this machine has reads it without an error; it names every command."""
    pytest.importorskip("shtab")
    assert cli.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    (tmp_path / "script").write_text(text)
    if (found := shutil.which(shell)) is not None:
        done = subprocess.run(
            [found, "-n", str(tmp_path / "script")], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


# --------------------------------------------------------------------------------------------------------- help
TIMES = {"S", "TIME"}
UNIT = re.compile(r"\b(seconds|[\d.]+ ?(ns|us|ms|s|min|h)\b|as for `spawnsim run`)")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    """It has a help text; one that takes a value names its default, if it has one, and the unit of a time or size."""
    missing = []
    for action in parser_of(command_of(command))._actions:
        text, name = action.help or "", "/".join(action.option_strings) or action.dest
        if not text.strip():
            missing.append(f"{name}: no help")
        takes = action.nargs != 0 and action.option_strings
        default = getattr(command_of(command), action.dest, None)
        if takes and default not in (None, "", ()) and "default" not in text:
            missing.append(f"{name}: its default is {default!r}, which is not said")
        if takes and action.metavar in TIMES and not UNIT.search(text):
            missing.append(f"{name}: no unit in {text!r}")
    assert missing == []


def test_there_are_few_options() -> None:
    """A new one has to earn its place: what a command takes by name may be a setting of `--set`.

    The last ones bound an exploration of schedules and replay its failures: a fuzzer's settings go to the program.
    """
    parsers = [parser_of(command_of(name)) for name in COMMANDS]
    assert (
        len({option for each in parsers for option in each._option_string_actions if option[:2] == "--"})
        <= 65
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_that_parses(command: str) -> None:
    """The help ends with them; each is a command line that the command's own parser takes."""
    assert command_of(command).examples
    shown = parser_of(command_of(command)).format_help()
    for example in command_of(command).examples:
        assert example in shown
        words = shlex.split(example)
        assert words[words.index("spawnsim") + 1] == command
        own = words[words.index("spawnsim") + 2 :]
        for end in (">", "--"):  # a shell's, or a script's own arguments
            own = own[: own.index(end)] if end in own else own
        _, unknown = parser_of(command_of(command)).parse_known_args(own)
        assert unknown == [] or command == "resume"


def test_the_help_of_one_command_leaves_the_next_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Examples are those of the command that is asked; spawnsim's own help has none; asking prints nothing else."""
    for command, there in (("plot", "spawnsim plot runs/a"), ("trace", "spawnsim trace runs/c")):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert there in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert "examples:" not in capsys.readouterr().out
    assert parser_of(command_of("plot")).prog == "spawnsim plot"
    assert capsys.readouterr().out == ""
