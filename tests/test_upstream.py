"""The patches of docs/upstream.md apply to the installed versions, and do what the page says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from docs.generate import HERE
from tests.support.processes import ROOT, environment

PAGE = (HERE / "upstream.md").read_text(encoding="utf-8")

#: By project and version: those of one library, in the order of the page.
PATCHES = {
    (title["project"].lower(), title["versions"].split()[-1]): patch
    for section in PAGE.split("\n## ")[1:]
    if (title := re.match(r"(?P<project>\w+) (?P<versions>[\w. ]+):", section))
    for patch in re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
}
TRAINED_WITH = ("accelerate", "transformers", "trl", "peft")

#: Writes to a file whether accelerate takes the name of a backend that torch knows, and one that
#: nobody knows; then the hooks on the embeddings, and the losses, of a model that PEFT wraps and of
#: TRL's trainer. argv: the file, an empty folder, and whether the former checkpoints reentrantly.
PROGRAM = """
import json, sys, torch, transformers, peft
from pathlib import Path
from accelerate.utils import DynamoBackend
from inductor_q import testing
from inductor_q.integrations.backend_name import forget_backend
from inductor_q.integrations.checkpointing import input_hooks
from tests.integrations.test_trainer_callback import trainer
from tests.integrations.test_trl import sft

def takes(name):
    try:
        return DynamoBackend(name).value == name
    except ValueError:
        return False

forget_backend()  # which the imports have made known
file, out, reentrant = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True"
found = {"takes": [takes("QFUSE"), takes("NOSUCH")], "hooks": [], "losses": []}
transformers.set_seed(0)
config = testing.tiny_qwen3_config(num_hidden_layers=1, pad_token_id=258)
plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
plain.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
plain = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"]))
for made in (trainer(out, net=plain, max_steps=2), sft(out, max_steps=2, bf16=True)):
    made.train()
    found["hooks"].append(len(list(input_hooks(made.model))))
    found["losses"].append([row["loss"] for row in made.state.log_history if "loss" in row])
file.write_text(json.dumps(found))
"""


def patched(folder: Path, project: str, patch: str) -> Path:
    """Link the files of an installed package into `folder`, and apply a patch to copies of those
    that it names."""
    spec = find_spec(project)
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent
    named = re.findall(r"^--- a/(\S+)$", patch, re.MULTILINE)
    below = "src" if named[0].startswith("src/") else ""
    shutil.copytree(installed, folder / below / project, copy_function=os.symlink)
    for name in named:
        (folder / name).unlink()
        shutil.copy(installed.parent / Path(name).relative_to(below), folder / name)
    command = ["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch"]
    done = subprocess.run(command, input=patch, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "offset" not in done.stdout
    return folder / below


def skip_unless_installed(project: str, wanted: str) -> None:
    if shutil.which("patch") is None:
        pytest.skip("there is no `patch` here")
    pytest.importorskip(project)
    if not version(project).startswith(f"{wanted}."):
        pytest.skip(f"the patch is for {project} {wanted}, {version(project)} is installed")


def test_the_page_has_a_patch_of_each_project() -> None:
    assert {project for project, _ in PATCHES} == {*TRAINED_WITH, "torch"}
    assert len(PATCHES) == PAGE.count("```diff")  # none is hidden by another


@pytest.mark.parametrize(("project", "wanted"), PATCHES)
def test_a_patch_applies(project: str, wanted: str, tmp_path: Path) -> None:
    skip_unless_installed(project, wanted)
    patched(tmp_path, project, PATCHES[project, wanted])


@pytest.mark.slow
def test_what_the_patches_do(tmp_path: Path) -> None:
    """The name of a backend is taken, and without reentrance no hook is there; losses are as they
    were. Once a library does it by itself, its patch is no longer needed."""
    folders: list[Path] = []
    for project, wanted in PATCHES:
        if project in TRAINED_WITH:
            skip_unless_installed(project, wanted)
            folders.append(patched(tmp_path / project, project, PATCHES[project, wanted]))

    def found(*ahead: Path, reentrant: bool) -> dict[str, Any]:
        file = tmp_path / "found.json"
        # -B: what Python compiles would be written where the links lead
        command = [sys.executable, "-B", "-c", PROGRAM]
        command += [str(file), str(tmp_path / "out"), str(reentrant)]
        done = subprocess.run(
            command, env=environment(*ahead, ROOT), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        read: dict[str, Any] = json.loads(file.read_text())
        return read

    before, after = found(reentrant=False), found(*folders, reentrant=False)
    assert before["takes"] == [False, False] and after["takes"] == [True, False]
    assert min(before["hooks"]) > 0 and after["hooks"] == [0, 0]
    assert before["losses"] == after["losses"]
    assert found(*folders, reentrant=True)["hooks"][0] > 0
