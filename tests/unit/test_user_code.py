"""A user's own code is found and used; a mistake in it is one line, with a traceback in the log, and never a crash."""

import importlib
import itertools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import fl_dist
from fl_dist.algorithms import algorithms, papers, parts
from fl_dist.common.reading import ConfigError
from fl_dist.main import main
from launch.rank import _leave
from tests.support.processes import QUIET, ROOT
from tests.support.run_folder import model_hash
from tests.support.snippets import snippets

SMALL = (
    *QUIET,
    "rounds=2",
    "model={name: mlp, hidden: [4]}",
    "clients={total: 4, per_round: 2}",
    "local={epochs: 1, batch_size: 64}",
)
PARTS = """
import torch
from fl_dist.core import Part, Upload

class Mine(Part):
"""
numbers = itertools.count()


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, in the working folder, that no test has imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return f"mine{next(numbers)}"


def complaint(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """The one line by which a run with these arguments ends."""
    capsys.readouterr()
    assert main([*SMALL, *arguments, f"run.dir=run{next(numbers)}"]) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: "), errors
    return errors[0]


VECTOR = "a vector like the model, a tensor of float32 and shape [336] on cpu"
HOOKS = {
    "direction of another shape": (
        "def direction(self, w, grad, s, i, r):\n        return grad(w)[:7]",
        f"part mine: direction gave a tensor of float32 and shape [7] on cpu, not {VECTOR}",
    ),
    "direction of another type": (
        "def direction(self, w, grad, s, i, r):\n        return grad(w).double()",
        f"part mine: direction gave a tensor of float64 and shape [336] on cpu, not {VECTOR}",
    ),
    "direction that returns nothing": (
        "def direction(self, w, grad, s, i, r):\n        grad(w)",
        f"part mine: direction gave nothing, not {VECTOR}",
    ),
    "direction that fails later": (
        "def begin(self, s, i, r, full):\n        i.step = 0\n\n"
        "    def direction(self, w, grad, s, i, r):\n        i.step += 1\n"
        "        return grad(w)[: 336 if i.step == 1 else 7]",
        f"the direction of a local step became a tensor of float32 and shape [7] on cpu, not {VECTOR}",
    ),
    "scalar update": (
        "def update(self, delta, s, mean, r):\n        return delta.mean()",
        f"part mine: update gave a tensor of float32 and shape [] on cpu, not {VECTOR}",
    ),
    "publish of a pair": (
        "def publish(self, x, s, r):\n        return x, x",
        f"part mine: publish gave a tuple, not {VECTOR}",
    ),
    "penalty a row": (
        "def penalty(self, seen, batch, s, i, forward):\n        return seen.logits.sum(1)",
        "part mine: penalty gave a tensor of float32 and shape [64] on cpu, not a number",
    ),
    "undeclared upload": (
        "def finish(self, delta, s, i, r):\n        return {'extra': delta}",
        "part mine: finish gave 'extra', which the part does not declare",
    ),
    "unsent upload": (
        "uploads = {'extra': Upload('samples')}",
        "part mine: finish did not give 'extra', which the part declares",
    ),
    "upload of another shape": (
        "uploads = {'extra': Upload('samples')}\n\n"
        "    def finish(self, delta, s, i, r):\n        return {'extra': delta[:3]}",
        f"part mine: finish, for 'extra', gave a tensor of float32 and shape [3] on cpu, not {VECTOR}",
    ),
    "client variable that grows": (
        "client = ('memory',)\n\n"
        "    def finish(self, delta, s, i, r):\n        i.memory = torch.cat([i.memory, delta])\n        return {}",
        "part mine: the client variable 'memory' became a tensor of float32 and shape [672] on cpu;"
        " it began as a tensor of float32 and shape [336]",
    ),
    "server variable that is not made": (
        "server = ('m',)\n\n    def server_init(self, x):\n        return {}",
        "part mine: server_init did not give 'm', which the part declares",
    ),
    "undeclared report": (
        "def report(self, s, mean, r):\n        return {'norm': 1.0}",
        "part mine: report gave 'norm', which the part does not declare",
    ),
    "server step that is not finite": (
        "def update(self, delta, s, mean, r):\n        return delta / 0",
        "round 1: the server step made values that are not finite; lower server.lr, or look at the server hooks",
    ),
    "layer that is not there": (
        "layers = ('layers.7',)",
        "a part asks for the layer 'layers.7' of the model; did you mean 'layers.1'?",
    ),
}


@pytest.mark.parametrize("mistake", HOOKS)
def test_a_hook_that_breaks_its_promise_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body, expected = HOOKS[mistake]
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    {body}\n")
    # Whatever the policy for clients that fail: a part is no client.
    line = complaint([f"algorithm={{parts: [{name}:Mine]}}", "clients.on_failure=drop"], capsys)
    assert expected in line


CHAINS = {
    "misspelt hook": (
        "def directoin(self, w, grad, s, i, r): ...",
        "part mine has a method 'directoin', which is no hook; did you mean 'direction'?",
    ),
    "text for names": ("client = 'memory'", "part mine: client has to be a tuple of names, not the text 'memory'"),
}


@pytest.mark.parametrize("mistake", CHAINS)
def test_a_part_with_wrong_names_is_refused(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body, expected = CHAINS[mistake]
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    {body}\n")
    assert expected in complaint([f"algorithm={{parts: [{name}:Mine]}}"], capsys, code=2)


def test_an_error_that_a_part_raises_itself_has_its_place_and_a_traceback(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(
        f"{PARTS}    def update(self, delta, s, mean, r):\n        raise ValueError('no')\n"
    )
    capsys.readouterr()
    assert main([*SMALL, f"algorithm={{parts: [{name}:Mine]}}", "run.dir=run"]) == 1
    assert capsys.readouterr().err == f"error: no ({name}.py, line 7); the traceback is in run/logs/rank0.log\n"
    assert "raise ValueError('no')" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


AUGMENTATIONS = {
    "nothing": "return lambda x, generator: None",
    "another type": "return lambda x, generator: x + 0.5",
    "fewer rows": "return lambda x, generator: x[1:]",
}


@pytest.mark.parametrize("mistake", AUGMENTATIONS)
def test_an_augmentation_keeps_the_type_and_the_rows(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(f"def mine():\n    {AUGMENTATIONS[mistake]}\n")
    line = complaint([f"augment={name}:mine"], capsys)
    assert "the augmentation made " in line and "keep the type and the number of rows" in line


def test_settings_of_all_kinds_of_types(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(
        "from enum import Enum\nfrom pathlib import Path\nfrom typing import Literal\nfrom torch import nn\n"
        "class Kind(Enum):\n    A = 'a'\n    B = 'b'\n"
        "def net(shape, outputs, *, kind: Kind = Kind.A, file: Path = Path('.'), sizes: tuple[int, str] = (1, 'x'),\n"
        "        some: set[int] = {3}, deep: list[int] = [], maybe: int | None = None, one: Literal['p', 'q'] = 'p'):\n"
        "    assert isinstance(kind, Kind) and isinstance(file, Path) and isinstance(sizes, tuple)\n"
        "    assert (kind, sizes, some, deep) in ((Kind.A, (1, 'x'), {3}, []), (Kind.B, (2, 'z'), {4, 5}, [1]))\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    assert main([*SMALL, f"model={name}:net", "run.dir=defaults"]) == 0
    given = "kind: b, file: /tmp, sizes: [2, z], some: [4, 5], deep: [1], maybe: 3, one: q"
    assert main([*SMALL, f"model={{name: {name}:net, {given}}}", "run.dir=given"]) == 0
    assert main([*SMALL, f"model={{name: {name}:net, {given}}}", "run.dir=given", "rounds=3"]) == 0
    assert fl_dist.load("given").config.model["sizes"] == [2, "z"]


def test_one_process_may_run_several_versions_and_namesakes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook: files are edited between runs, within one second, and two folders have a module of one name."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = (
        "from torch import nn\ndef net(shape, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, {0}), nn.Linear({0}, outputs))\n"
    )
    sizes = []
    for folder, width in (("a", 3), ("b", 5), ("a", 7), ("b", 5)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text.format(width))
        (tmp_path / folder / "c.yaml").write_text(
            f"rounds: 1\nmodel: {name}:net\nmonitor: {{wandb: {{mode: disabled}}}}\n"
        )
        made = fl_dist.run(tmp_path / folder / "c.yaml", run={"dir": f"run{len(sizes)}"}, quiet=True)
        sizes.append(len(load_file(made.path / "model.safetensors")["1.bias"]))
    assert sizes == [3, 5, 7, 5]
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "c.yaml").write_text(f"model: {name}:net\n")
    with pytest.raises(ConfigError, match=f"there is no module '{name}'"):  # no longer beside another configuration
        fl_dist.run(tmp_path / "d" / "c.yaml")


def test_what_a_process_imported_itself_stays_what_it_is_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script holds functions of its modules: unless their file was edited, a run from another folder keeps them."""
    monkeypatch.delenv("PYTHONPATH")
    for folder, module in (("here", name), ("there", f"{name}_too")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{module}.py").write_text(
            "from torch import nn\n"
            "def net(shape, outputs):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
        )
    monkeypatch.chdir(tmp_path / "here")
    sys.path.insert(0, "")
    held = importlib.import_module(name)
    for module, edited in ((name, False), (f"{name}_too", False), (name, True)):
        monkeypatch.chdir(tmp_path / ("there" if module != name else "here"))
        if edited:
            Path(f"{name}.py").write_text(Path(f"{name}.py").read_text() + "# now\n")
        assert main([*SMALL, f"model={module}:net", f"run.dir={tmp_path}/run{module}{edited}"]) == 0
        assert (sys.modules[name] is held) != edited


BUILDERS = {
    "no module": ("", "model=nothing.at_all:net", "model: there is no module 'nothing' in the working folder "),
    "no name": ("def net(): ...", "model={}:nets", "py has no 'nets'; did you mean 'net'? (set in the command line)"),
    "no form": ("", "model=':net'", "model: ':net' is not of the form module:name"),
    "not callable": ("net = 3", "model={}:net", "net is of type int, not a function or a class"),
    "syntax": ("def net(:\n    pass", "model={}:net", "failed: SyntaxError: invalid syntax"),
    "exit": ("import sys\nsys.exit(3)", "model={}:net", "failed: SystemExit: 3 ("),
    "untyped keyword": (
        "def net(shape, outputs, *, width=3): ...",
        "model={}:net",
        "its keyword 'width' has no type; write one, as in width: int = 3",
    ),
    "unknown parameter": (
        "def net(shape, num_classes): ...",
        "model={}:net",
        "its parameter 'num_classes' is not one of those that the program supplies "
        "(shape, outputs, classes, vocabulary); put "
        "it behind a * if it is a setting",
    ),
    "type of no configuration": (
        "import torch\ndef net(*, start: torch.Tensor): ...",
        "model={}:net",
        "its signature is no list of settings: ",
    ),
    "taken key": (
        "def net(shape, outputs, *, train: bool = True): ...",
        "model={}:net",
        "its keyword 'train' has to have another name; model.train is taken",
    ),
    "unknown setting": (
        "def net(shape, outputs, *, width: int = 3): ...",
        "model={{name: {}:net, widht: 4}}",
        "unknown key model.widht (set in the command line); did you mean 'width'?",
    ),
    "wrong setting": (
        "def net(shape, outputs, *, width: int = 3): ...",
        "model={{name: {}:net, width: wide}}",
        "model.width (set in the command line): input should be a valid integer, got 'wide'",
    ),
}


@pytest.mark.parametrize("mistake", BUILDERS)
def test_a_builder_that_cannot_be_used_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, override, expected = BUILDERS[mistake]
    (tmp_path / f"{name}.py").write_text(text)
    assert expected in complaint([override.format(name)], capsys, code=2)


PRODUCTS = {
    "exit": ("import sys\ndef net(shape): sys.exit(0)", "model {}:net failed: SystemExit: 0 ({}.py, line 2)"),
    "exit in a pass": (
        "import sys\nfrom torch import nn\nclass net(nn.Linear):\n"
        "    def __init__(self, shape, outputs): super().__init__(64, outputs)\n"
        "    def forward(self, x):\n        if self.training: sys.exit(0)\n"
        "        return super().forward(x.flatten(1))",
        "RuntimeError: something called sys.exit(0) ({}.py, line 6)",
    ),
    "not finite": (
        "from torch import nn\nclass net(nn.Linear):\n"
        "    def __init__(self, shape, outputs): super().__init__(64, outputs)\n"
        "    def forward(self, x): return super().forward(x.flatten(1)) / 0",
        "model {}:net gave values that are not finite for rows of shape [1, 8, 8], before any training",
    ),
    "not a module": ("def net(shape, outputs): return 3", "model {}:net gave 3; it has to be a Module"),
    "a bug": (
        "def net(shape, outputs): return shape.size",
        "model {}:net failed: AttributeError: 'tuple' object has no attribute 'size' ({}.py, line 1)",
    ),
    "cannot take rows": (
        "from torch import nn\ndef net(shape, outputs): return nn.Linear(3, outputs)",
        "model {}:net cannot take rows of shape [1, 8, 8]: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "other outputs": (
        "from torch import nn\ndef net(shape): return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))",
        "model {}:net gave shape [2, 7] for 2 rows of shape [1, 8, 8], not 10 numbers for each, as task classification",
    ),
    "no tensor": (
        "from torch import nn\nclass net(nn.Module):\n"
        "    def __init__(self, shape):\n        super().__init__()\n        self.a = nn.Linear(2, 2)\n"
        "    def forward(self, x): return {'logits': x}",
        "model {}:net gave a dict for rows of shape [1, 8, 8]; it has to give a tensor",
    ),
    "nothing to train": (
        "from torch import nn\ndef net(shape, outputs): return nn.Flatten()",
        "the model has no parameter that is to be trained",
    ),
}


@pytest.mark.parametrize("mistake", PRODUCTS)
def test_a_model_that_does_not_fit_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, expected = PRODUCTS[mistake]
    (tmp_path / f"{name}.py").write_text(text)
    assert expected.format(name, name) in complaint([f"model={name}:net"], capsys)


TASK = """
import torch
from fl_dist.tasks import Headline, Task

class Mine(Task):
    headline = Headline("good")

    def loss(self, outputs, y):
        return (outputs[:, 0] - y).square().mean()

    def measure(self, outputs, y):
        return {"loss": outputs[:, 0] - y, "good": outputs[:, 0] > 0}
"""
TASKS = {
    "loss a row": (
        ".square().mean()",
        ".square()",
        "loss gave a tensor of float32 and shape [2] on cpu, not a tensor of",
    ),
    "no dict": ("return {", "return outputs, {", "measure gave a tuple, not a dict of tensors"),
    "a mean": ("outputs[:, 0] > 0", "(outputs[:, 0] > 0).double().mean()", "measure gave one number for 'good', not"),
    "no best": ('Headline("good")', 'Headline("good", "most")', "the best of its headline is 'most', not max or min"),
    "no headline": (', "good": outputs[:, 0] > 0', "", "its metrics are loss; 'good' is missing"),
    "a bug": ("outputs[:, 0] > 0", "outputs[:, 0] > zero", "NameError: name 'zero' is not defined ({}.py, line 12)"),
}


@pytest.mark.parametrize("mistake", TASKS)
def test_a_task_that_breaks_its_promise_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right, wrong, expected = TASKS[mistake]
    (tmp_path / f"{name}.py").write_text(TASK.replace(right, wrong))
    line = complaint([f"task={name}:Mine", "algorithm=fedavg"], capsys)
    assert f"task {name}:Mine" in line and expected.format(name) in line


def test_a_task_without_logits_is_refused_by_what_needs_them(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom fl_dist.data import Dataset\n"
        "def rows():\n    x = torch.rand(40, 3)\n    return Dataset(x, x.sum(1), x, x.sum(1))\n"
    )
    own = [f"data={name}:rows", "partition=iid", "task=regression"]
    line = complaint([*own, "algorithm=fedgmt"], capsys, code=2)
    assert "the part trajectory of this algorithm needs logits of classes, which the task regression does not" in line
    line = complaint([f"data={name}:rows", "partition=iid"], capsys)
    assert "task classification needs a whole number as the label of each row; y_train is of float32" in line
    line = complaint([f"data={name}:rows", "partition=dirichlet", "task=regression", "algorithm=fedavg"], capsys)
    assert "partition dirichlet divides rows by their class, and this data has none; choose iid or given" in line


def test_code_that_changes_between_a_run_and_its_resumption_is_told(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also in a module beside the one that is named."""
    (tmp_path / f"{name}_width.py").write_text("WIDTH = 4\n\ndef width():\n    return WIDTH\n")
    (tmp_path / f"{name}.py").write_text(
        f"from torch import nn\nfrom {name}_width import width\n"
        "def net(shape, outputs):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, width()), nn.Linear(4, outputs))\n"
    )
    arguments = [*SMALL, f"model={name}:net", "run.dir=run"]
    assert main(arguments) == 0
    first = model_hash(tmp_path / "run")
    assert main([*arguments, "rounds=3"]) == 0
    assert "changed" not in capsys.readouterr().err
    (tmp_path / f"{name}_width.py").write_text("WIDTH = 4\n\ndef width():\n    return 4\n")
    assert main([*arguments, "rounds=4"]) == 0
    assert "your own source files have changed since this run began" in capsys.readouterr().err
    assert model_hash(tmp_path / "run") != first


def test_counts_of_steps_may_be_large(name: str, tmp_path: Path) -> None:
    """FedNova of the guide sends its number of steps, here 4,311."""
    (tmp_path / f"{name}.py").write_text(next(s.text for s in snippets("python") if "def fednova()" in s.text))
    one = ["clients={total: 1, per_round: 1}", "partition=iid", "local={epochs: 3, batch_size: 1, lr: 0.001}"]
    try:
        assert main([*SMALL, *one, f"algorithm={name}:fednova", "rounds=1", "run.dir=run"]) == 0
        assert main([*SMALL, *one, "algorithm=fedavg", "rounds=1", "run.dir=fedavg"]) == 0
    finally:
        forget_fednova()
    ours, plain = (load_file(f"{folder}/model.safetensors") for folder in ("run", "fedavg"))
    assert all(torch.allclose(ours[key], plain[key], atol=1e-6) for key in plain)


def forget_fednova() -> None:
    """The guide's file registers its part and its algorithm."""
    for registry, registered in ((parts, "normalised"), (algorithms, "fednova")):
        registry._builders.pop(registered, None)
    papers.pop("fednova", None)


def test_partitions_and_augmentations_of_ones_own(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import numpy as np, torch\n"
        "def turns(rows: int, clients: int, *, first: int = 0):\n"
        "    return [np.arange((first + k) % clients, rows, clients) for k in range(clients)]\n"
        "def noise(*, size: float = 0.1):\n"
        "    return lambda x, generator: (x + size * torch.rand(x.shape, generator=generator)).to(x.dtype)\n"
    )
    own = [f"partition={{name: {name}:turns, first: 1}}", f"augment={{name: {name}:noise, size: 2.0}}"]
    assert main([*SMALL, *own, "run.dir=run"]) == 0
    assert main([*SMALL, own[0], "run.dir=plain"]) == 0
    assert model_hash(tmp_path / "run") != model_hash(tmp_path / "plain")
    assert fl_dist.load("run").clients.rows[3].tolist() == list(range(0, 1437, 4))


def test_a_signal_before_anything_began_is_no_exit_of_the_users_code(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launched ranks leave by SystemExit when a signal comes while their configuration is read."""
    (tmp_path / f"{name}.py").write_text("def net(shape, outputs): ...")

    interrupted = eval("lambda words: leave(15, None)", {"leave": _leave})  # in no file of the user's
    with mock.patch("fl_dist.main.resolve", interrupted), pytest.raises(SystemExit) as left:
        main([*SMALL, f"model={name}:net"])
    assert left.value.code == 75 and capsys.readouterr().err == ""
