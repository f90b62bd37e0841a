"""User code is imported and used; an error in it is one line, with a traceback in the log."""

import itertools
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

import fl_dist
from fl_dist.algorithms import algorithms, papers, parts
from fl_dist.common.errors import ConfigError
from fl_dist.main import main
from launch.rank import _exit_on_signal
from tests.support.processes import NO_WANDB, ROOT
from tests.support.run_folder import model_hash
from tests.support.snippets import snippets

SMALL = (
    *NO_WANDB,
    "rounds=2",
    "model={name: mlp, hidden: [4]}",
    "clients={total: 4, per_round: 2}",
    "local={epochs: 1, batch_size: 64}",
)
PARTS = """
import torch
from fl_dist.algorithms.core import Part, Upload

class UserPart(Part):
"""
file_numbers = itertools.count()


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a user module in the working folder that no test has imported yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return f"user_code{next(file_numbers)}"


def run_error(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    """The error line of a run with these arguments."""
    capsys.readouterr()
    assert main([*SMALL, *arguments, f"run.dir=run{next(file_numbers)}"]) == code
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: "), errors
    return errors[0]


VECTOR = "a vector like the model, a tensor of float32 and shape [336] on cpu"
BAD_HOOKS = {
    "direction of another shape": (
        "def direction(self, w, grad, s, i, r):\n        return grad(w)[:7]",
        f"part userpart: direction gave a tensor of float32 and shape [7] on cpu, not {VECTOR}",
    ),
    "direction of another type": (
        "def direction(self, w, grad, s, i, r):\n        return grad(w).double()",
        f"part userpart: direction gave a tensor of float64 and shape [336] on cpu, not {VECTOR}",
    ),
    "direction that returns nothing": (
        "def direction(self, w, grad, s, i, r):\n        grad(w)",
        f"part userpart: direction gave nothing, not {VECTOR}",
    ),
    "direction that fails later": (
        "def begin(self, s, i, r, full):\n        i.step = 0\n\n"
        "    def direction(self, w, grad, s, i, r):\n        i.step += 1\n"
        "        return grad(w)[: 336 if i.step == 1 else 7]",
        f"the direction of a local step gave a tensor of float32 and shape [7] on cpu, not {VECTOR}",
    ),
    "scalar update": (
        "def update(self, delta, s, mean, r):\n        return delta.mean()",
        f"part userpart: update gave a tensor of float32 and shape [] on cpu, not {VECTOR}",
    ),
    "update in place": (
        "def update(self, delta, s, mean, r):\n        return delta.mul_(2)",
        "part userpart: update modified `delta` in place; compute a new tensor from it",
    ),
    "update past torch": (
        "def update(self, delta, s, mean, r):\n        delta.data.mul_(2)\n        return delta",
        "part userpart: update modified `delta` in place; compute a new tensor from it",
    ),
    "update through numpy": (
        "def update(self, delta, s, mean, r):\n        delta.numpy()[:] = 0\n        return delta",
        "part userpart: update modified `delta` in place; compute a new tensor from it",
    ),
    "finish in place": (
        "def finish(self, delta, s, i, r):\n        delta.mul_(2)\n        return {}",
        "part userpart: finish modified `delta` in place; compute a new tensor from it",
    ),
    "publish in place": (
        "def publish(self, x, s, r):\n        return x.add_(1)",
        "part userpart: publish modified `x` in place; compute a new tensor from it",
    ),
    "publish of a pair": (
        "def publish(self, x, s, r):\n        return x, x",
        f"part userpart: publish gave a tuple, not {VECTOR}",
    ),
    "penalty a row": (
        "def penalty(self, seen, batch, s, i, forward):\n        return seen.logits.sum(1)",
        "part userpart: penalty gave a tensor of float32 and shape [64] on cpu, not a number",
    ),
    "undeclared upload": (
        "def finish(self, delta, s, i, r):\n        return {'extra': delta}",
        "part userpart: finish gave 'extra', which the part does not declare",
    ),
    "unsent upload": (
        "uploads = {'extra': Upload('samples')}",
        "part userpart: finish did not give 'extra', which the part declares",
    ),
    "upload of another shape": (
        "uploads = {'extra': Upload('samples')}\n\n"
        "    def finish(self, delta, s, i, r):\n        return {'extra': delta[:3]}",
        f"part userpart: finish, for 'extra', gave a tensor of float32 and shape [3] on cpu, not {VECTOR}",
    ),
    "client variable that grows": (
        "client = ('memory',)\n\n"
        "    def finish(self, delta, s, i, r):\n        i.memory = torch.cat([i.memory, delta])\n        return {}",
        "part userpart: the client variable 'memory' became a tensor of float32 and shape [672] on cpu;"
        " it began as a tensor of float32 and shape [336]",
    ),
    "server variable that is not made": (
        "server = ('m',)\n\n    def server_init(self, x):\n        return {}",
        "part userpart: server_init did not give 'm', which the part declares",
    ),
    "undeclared report": (
        "def report(self, s, mean, r):\n        return {'norm': 1.0}",
        "part userpart: report gave 'norm', which the part does not declare",
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


@pytest.mark.parametrize("mistake", BAD_HOOKS)
def test_a_hook_that_violates_its_contract_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body, expected = BAD_HOOKS[mistake]
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    {body}\n")
    # An error of a part is not a client failure.
    line = run_error([f"algorithm={{parts: [{name}:UserPart]}}", "clients.on_failure=drop"], capsys)
    assert expected in line


def test_an_undeclared_server_variable_lasts_until_the_end_of_the_round(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A checkpoint would not hold it: a resumed run would have other bits."""
    keep = "def update(self, delta, s, mean, r):\n        s.last = delta\n        return delta"
    (tmp_path / f"{name}.py").write_text(
        f"{PARTS}    {keep}\n\n    def publish(self, x, s, r):\n        return x + s.last\n"
    )
    line = run_error([f"algorithm={{parts: [{name}:UserPart]}}"], capsys)
    assert "there is no variable 'last' here, only x" in line
    read = "reports = {'last': 'norm'}\n\n    def report(self, s, mean, r):\n        return {'last': s.last.norm()}"
    (tmp_path / f"{name}_read.py").write_text(f"{PARTS}    {keep}\n\n    {read}\n")
    assert main([*SMALL, f"algorithm={{parts: [{name}_read:UserPart]}}", "run.dir=run"]) == 0


def test_a_part_that_keeps_state_in_itself_is_reported_once(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = "def update(self, delta, s, mean, r):\n        self.last = delta.clone()\n        return delta"
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    {body}\n")
    assert main([*SMALL, f"algorithm={{parts: [{name}:UserPart]}}", "run.dir=run"]) == 0
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: part userpart changed its attribute 'last' in a round")


BAD_PARTS = {
    "misspelt hook": (
        "def directoin(self, w, grad, s, i, r): ...",
        "part userpart has a method 'directoin', which is not a hook; did you mean 'direction'?",
    ),
    "old name of a hook": (
        "def settle(self, s, r): ...",
        "part userpart has 'settle', which is called 'after_update'; rename it",
    ),
    "old name of an attribute": (
        "extra = (1, 0)",
        "part userpart has 'extra', which is called 'extra_passes'; rename it",
    ),
    "old name set in the constructor": (
        "def __init__(self):\n        self.extra = (1, 1)",
        "part userpart has 'extra', which is called 'extra_passes'; rename it",
    ),
    "text for names": ("client = 'memory'", "part userpart: client must be a tuple of names, not the text 'memory'"),
    "misspelt need": (
        "needs = ('all_updates',)",
        "part userpart has the need 'all_updates'; did you mean 'all updates'?",
    ),
}


@pytest.mark.parametrize("mistake", BAD_PARTS)
def test_a_part_with_wrong_names_is_refused(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body, expected = BAD_PARTS[mistake]
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    {body}\n")
    assert expected in run_error([f"algorithm={{parts: [{name}:UserPart]}}"], capsys, code=2)


SETTERS = {
    "begin": "def begin(self, s, i, r, full):\n        i.correction = s.x",
    "inputs": "def inputs(self, x, i):\n        i.correction = 0\n        return x",
    "penalty": "def penalty(self, output, batch, s, i, forward):\n        i.correction = 0\n        return 0.0",
    "direction": "def direction(self, w, grad, s, i, r):\n        i.correction = g = grad(w)\n        return g",
    "finish": "def finish(self, delta, s, i, r):\n        i.correction = delta\n        return {}",
}


@pytest.mark.parametrize("hook", SETTERS)
def test_two_parts_cannot_set_the_same_transient_variable(
    hook: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    {SETTERS[hook]}\n")
    chain = f"algorithm={{parts: [scaffold, {name}:UserPart]}}"
    line = run_error([chain, "clients.on_failure=drop", "local.momentum=0"], capsys)
    assert "parts scaffold and userpart both set the client variable 'correction'; rename it in one of" in line


@pytest.mark.parametrize(
    ("hook", "what"),
    [
        ("def finish(self, delta, s, i, r):\n        i.c_i = delta\n        return {}", "client variable 'c_i'"),
        ("def update(self, delta, s, mean, r):\n        s.c = delta\n        return delta", "server variable 'c'"),
        ("def after_update(self, s, r):\n        s.c = s.x", "server variable 'c'"),
    ],
)
def test_a_part_cannot_set_the_variables_of_another(
    hook: str, what: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(f"{PARTS}    {hook}\n")
    line = run_error([f"algorithm={{parts: [scaffold, {name}:UserPart]}}", "local.momentum=0"], capsys)
    assert f"parts scaffold and userpart both set the {what}; rename it in one of them" in line


def test_a_part_may_read_the_variables_of_another_and_set_its_own(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(
        f"{PARTS}    def begin(self, s, i, r, full):\n        i.own = i.correction + i.c_i\n\n"
        "    def direction(self, w, grad, s, i, r):\n        i.own = i.own * 2\n        return grad(w)\n"
    )
    assert main([*SMALL, f"algorithm={{parts: [scaffold, {name}:UserPart]}}", "run.dir=run"]) == 0


def test_a_part_may_be_a_data_class(name: str, tmp_path: Path) -> None:
    """Which cannot be hashed."""
    part = PARTS.replace("class", "@dataclasses.dataclass\nclass").replace("import torch", "import dataclasses")
    (tmp_path / f"{name}.py").write_text(f"{part}    def publish(self, x, s, r):\n        return x\n")
    assert main([*SMALL, f"algorithm={{parts: [{name}:UserPart]}}", "run.dir=run"]) == 0


def test_an_error_raised_by_a_part_has_its_line_and_a_traceback(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(
        f"{PARTS}    def update(self, delta, s, mean, r):\n        raise ValueError('no')\n"
    )
    capsys.readouterr()
    assert main([*SMALL, f"algorithm={{parts: [{name}:UserPart]}}", "run.dir=run"]) == 1
    assert capsys.readouterr().err == f"error: no ({name}.py, line 7); the traceback is in run/logs/rank0.log\n"
    assert "raise ValueError('no')" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


AUGMENTATIONS = {
    "nothing": "return lambda x, generator: None",
    "another type": "return lambda x, generator: x + 0.5",
    "fewer rows": "return lambda x, generator: x[1:]",
}


@pytest.mark.parametrize("mistake", AUGMENTATIONS)
def test_an_augmentation_must_keep_type_and_rows(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(f"def augment():\n    {AUGMENTATIONS[mistake]}\n")
    line = run_error([f"augment={name}:augment"], capsys)
    assert "the augmentation returned " in line and "keep the type and the number of rows" in line


def test_settings_may_have_any_supported_type(name: str, tmp_path: Path) -> None:
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
    settings = "kind: b, file: /tmp, sizes: [2, z], some: [4, 5], deep: [1], maybe: 3, one: q"
    assert main([*SMALL, f"model={{name: {name}:net, {settings}}}", "run.dir=set"]) == 0
    assert main([*SMALL, f"model={{name: {name}:net, {settings}}}", "run.dir=set", "rounds=3"]) == 0
    assert fl_dist.load("set").config.model["sizes"] == [2, "z"]


def test_modules_beside_a_configuration_are_importable_only_for_its_run(name: str, tmp_path: Path) -> None:
    for folder, module in (("a", f"{name}_a"), ("b", f"{name}_b"), ("c", f"{name}_c")):
        (tmp_path / folder).mkdir()
        keys = f"rounds: 1\nmodel: {module}:net\nmonitor: {{wandb: {{mode: disabled}}}}\n"
        (tmp_path / folder / "config.yaml").write_text(keys)
        (tmp_path / ("a" if folder == "c" else folder) / f"{module}.py").write_text(
            "from torch import nn\n"
            "def net(shape, outputs):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))\n"
        )
    for folder in ("a", "b"):
        run = fl_dist.run(tmp_path / folder / "config.yaml", run={"dir": f"run_{folder}"}, quiet=True)
        assert run.finished and run.model()
    with pytest.raises(ConfigError, match=f"there is no module '{name}_c'"):
        fl_dist.run(tmp_path / "c" / "config.yaml")


BAD_BUILDERS = {
    "no module": ("", "model=nothing.at_all:net", "model: there is no module 'nothing' in the working folder "),
    "no name": ("def net(): ...", "model={}:nets", "py has no 'nets'; did you mean 'net'? (set on the command line)"),
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
        "(shape, outputs, classes, vocabulary, per_token); put "
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
        "unknown key model.widht (set on the command line); did you mean 'width'?",
    ),
    "wrong setting": (
        "def net(shape, outputs, *, width: int = 3): ...",
        "model={{name: {}:net, width: wide}}",
        "model.width (set on the command line): input should be a valid integer, got 'wide'",
    ),
}


@pytest.mark.parametrize("mistake", BAD_BUILDERS)
def test_an_unusable_builder_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, override, expected = BAD_BUILDERS[mistake]
    (tmp_path / f"{name}.py").write_text(text)
    assert expected in run_error([override.format(name)], capsys, code=2)


BAD_MODELS = {
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
    "not a module": ("def net(shape, outputs): return 3", "model {}:net gave 3; expected: Module"),
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


@pytest.mark.parametrize("mistake", BAD_MODELS)
def test_an_unsuitable_model_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text, expected = BAD_MODELS[mistake]
    (tmp_path / f"{name}.py").write_text(text)
    assert expected.format(name, name) in run_error([f"model={name}:net"], capsys)


TASK = """
import torch
from fl_dist.tasks import PrimaryMetric, Task

class UserTask(Task):
    primary_metric = PrimaryMetric("good")

    def loss(self, outputs, y):
        return (outputs[:, 0] - y).square().mean()

    def measure(self, outputs, y):
        return {"loss": outputs[:, 0] - y, "good": outputs[:, 0] > 0}
"""
BAD_TASKS = {
    "loss a row": (
        ".square().mean()",
        ".square()",
        "loss gave a tensor of float32 and shape [2] on cpu, not a tensor of",
    ),
    "no dict": ("return {", "return outputs, {", "measure gave a tuple, not a dict of tensors"),
    "a mean": ("outputs[:, 0] > 0", "(outputs[:, 0] > 0).double().mean()", "measure gave one number for 'good', not"),
    "no best": (
        'PrimaryMetric("good")',
        'PrimaryMetric("good", "most")',
        "the best of its primary_metric is 'most', not max or min",
    ),
    "no primary_metric": (', "good": outputs[:, 0] > 0', "", "its metrics are loss; 'good' is missing"),
    "old name of primary_metric": (
        "    primary_metric = ",
        "    headline = ",
        "has 'headline', which is called 'primary_metric'; rename it",
    ),
    "a bug": ("outputs[:, 0] > 0", "outputs[:, 0] > zero", "NameError: name 'zero' is not defined ({}.py, line 12)"),
}


@pytest.mark.parametrize("mistake", BAD_TASKS)
def test_a_task_that_violates_its_contract_is_named(
    mistake: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    right, wrong, expected = BAD_TASKS[mistake]
    (tmp_path / f"{name}.py").write_text(TASK.replace(right, wrong))
    line = run_error([f"task={name}:UserTask", "algorithm=fedavg"], capsys)
    assert f"task {name}:UserTask" in line and expected.format(name) in line


def test_a_task_without_logits_is_refused_by_parts_that_need_them(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom fl_dist.data import Dataset\n"
        "def rows():\n    x = torch.rand(40, 3)\n    return Dataset(x, x.sum(1), x, x.sum(1))\n"
    )
    user_settings = [f"data={name}:rows", "partition=iid", "task=regression"]
    line = run_error([*user_settings, "algorithm=fedgmt"], capsys, code=2)
    assert "the part trajectory of this algorithm needs logits of classes, which the task regression does not" in line
    line = run_error([f"data={name}:rows", "partition=iid"], capsys)
    assert "task classification needs a whole number as the label of each row; y_train has type float32" in line
    assert line.endswith("convert it to integers; for real targets set task=regression")
    line = run_error([f"data={name}:rows", "partition=dirichlet", "task=regression", "algorithm=fedavg"], capsys)
    assert "partition dirichlet divides rows by class, but this data has no labels; choose iid or given" in line


def test_changed_source_files_give_a_warning_on_resume(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also in a module that the named one imports."""
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
    assert "your source files have changed since this run started" in capsys.readouterr().err
    assert model_hash(tmp_path / "run") != first


def test_large_step_counts_are_summed_exactly(name: str, tmp_path: Path) -> None:
    """FedNova of the guide sends its number of steps, here 4,311."""
    (tmp_path / f"{name}.py").write_text(next(s.text for s in snippets("python") if "def fednova()" in s.text))
    one = ["clients={total: 1, per_round: 1}", "partition=iid", "local={epochs: 3, batch_size: 1, lr: 0.001}"]
    try:
        assert main([*SMALL, *one, f"algorithm={name}:fednova", "rounds=1", "run.dir=run"]) == 0
        assert main([*SMALL, *one, "algorithm=fedavg", "rounds=1", "run.dir=fedavg"]) == 0
    finally:
        unregister_fednova()
    nova, plain = (load_file(f"{folder}/model.safetensors") for folder in ("run", "fedavg"))
    assert all(torch.allclose(nova[key], plain[key], atol=1e-6) for key in plain)


def unregister_fednova() -> None:
    """Unregister the part and the algorithm of the guide."""
    for registry, registered in ((parts, "normalised"), (algorithms, "fednova")):
        registry._builders.pop(registered, None)
    papers.pop("fednova", None)


def test_user_partitions_and_augmentations_are_used(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text(
        "import numpy as np, torch\n"
        "def turns(rows: int, clients: int, *, first: int = 0):\n"
        "    return [np.arange((first + k) % clients, rows, clients) for k in range(clients)]\n"
        "def noise(*, size: float = 0.1):\n"
        "    return lambda x, generator: (x + size * torch.rand(x.shape, generator=generator)).to(x.dtype)\n"
    )
    user_settings = [f"partition={{name: {name}:turns, first: 1}}", f"augment={{name: {name}:noise, size: 2.0}}"]
    assert main([*SMALL, *user_settings, "run.dir=run"]) == 0
    assert main([*SMALL, user_settings[0], "run.dir=plain"]) == 0
    assert model_hash(tmp_path / "run") != model_hash(tmp_path / "plain")
    assert fl_dist.load("run").clients.rows[3].tolist() == list(range(0, 1437, 4))


def test_a_signal_before_the_start_is_not_an_exit_of_user_code(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launched ranks raise SystemExit if a signal arrives while they read their configuration."""
    (tmp_path / f"{name}.py").write_text("def net(shape, outputs): ...")

    interrupted = eval("lambda words: leave(15, None)", {"leave": _exit_on_signal})  # not in a file of the user
    with mock.patch("fl_dist.run_command.resolve_arguments", interrupted), pytest.raises(SystemExit) as exit_info:
        main([*SMALL, f"model={name}:net"])
    assert exit_info.value.code == 75 and capsys.readouterr().err == ""
