# SPDX-License-Identifier: MIT
"""Every operation by its declaration: schema, fake, checks, twins of the same signature."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import oss_fused.kernels
from oss_fused.errors import OssFusedError, SchemeError, ShapeMismatchError, UnsupportedDtypeError
from oss_fused.kernels.checks import FP8
from oss_fused.kernels.contract import Between, Contract, OneOf, Operand, Scale
from oss_fused.kernels.op import OPERATIONS, get_kernel

FOLDER = Path(oss_fused.kernels.__file__).parent
OP_NAMES = sorted(OPERATIONS)


def copies(args):
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize("name", OP_NAMES)
def test_the_fake_has_the_shapes_and_dtypes_of_the_result(name, check_op):
    args = OPERATIONS[name].contract.example()
    op = getattr(torch.ops.oss_fused, name)
    if OPERATIONS[name].mutates:
        tests = ("test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op, copies(args), test_utils=tests)
    else:
        check_op(op.default, args)


_COMPILE_ALL = """
import json
import os
import torch
import torch._dynamo.testing
import oss_fused.kernels
from oss_fused.kernels.op import OPERATIONS

graphs = {}
for name, operation in OPERATIONS.items():
    op = getattr(torch.ops.oss_fused, name)
    sizes = operation.contract.sizes
    rows = {n: 9 for n in ("T", "M", "B") if n in sizes}
    if "..." in sizes:
        rows["..."] = (*sizes["..."][:-1], 9)
    if operation.mutates or not rows:
        continue
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda *a: op(*a), backend=counter, dynamic=True, fullgraph=True)
    compiled(*operation.contract.example())
    compiled(*operation.contract.example(**rows))
    graphs[name] = counter.frame_count
print(json.dumps(graphs))
"""


def test_fakes_stay_general_in_the_number_of_rows():
    """One graph serves every number of tokens: no fake branches on it."""
    # in a process of its own: other tests import what changes torch.compile, or switch it off
    command = [sys.executable, "-c", _COMPILE_ALL]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    graphs = json.loads(done.stdout.splitlines()[-1])
    assert len(graphs) >= 12 and set(graphs.values()) == {1}, graphs


@pytest.mark.parametrize("name", OP_NAMES)
def test_every_backend_takes_the_arguments_of_the_reference(name):
    operation = OPERATIONS[name]
    expected = list(inspect.signature(operation.reference).parameters)
    for module in operation.modules.values():
        file = FOLDER.parent.parent.joinpath(*module.split(".")).with_suffix(".py")
        definition = next(
            node
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef | ast.ImportFrom)
            and (
                getattr(node, "name", None) == name
                or any(alias.name == name for alias in getattr(node, "names", ()))
            )
        )
        if isinstance(definition, ast.FunctionDef):
            names = [argument.arg for argument in definition.args.args]
            assert names[: len(expected)] == expected, module


def test_no_schema_is_written_by_hand():
    for path in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "define":
                assert path.name == "op.py", path


@pytest.mark.parametrize("name", OP_NAMES)
def test_a_wrong_argument_is_named(name):
    """Each tensor with one dimension too many, and with a dtype that nothing takes."""
    contract = OPERATIONS[name].contract
    args = contract.example()
    rules = {n: rule for _, n, rule in contract.rules}
    for i, (argument, value) in enumerate(zip(contract.names, args)):
        rule = rules.get(argument)
        if not isinstance(value, torch.Tensor) or not isinstance(rule, Operand):
            continue
        bad = [value.to(torch.complex64)]
        if not rule.prefix and value.numel() != 1:
            bad.append(value[..., None].expand(*value.shape, 3))
        for wrong in bad:
            changed = (*args[:i], wrong, *args[i + 1 :])
            # an argument of the same dtype or size may be the one that is named
            with pytest.raises(OssFusedError, match=rf"^({argument}|\w+)\.(dtype|shape)="):
                get_kernel("torch", name)(*changed)


@pytest.mark.parametrize("name", OP_NAMES)
def test_every_eps_is_a_number_that_a_norm_can_add(name):
    contract = OPERATIONS[name].contract
    for i, argument in enumerate(contract.names):
        for value in (-1e-5, float("nan"), float("inf")) if argument.endswith("eps") else ():
            args = (*contract.example()[:i], value, *contract.example()[i + 1 :])
            with pytest.raises(SchemeError, match=f"^{argument}={value!r}: expected a finite"):
                get_kernel("torch", name)(*args)


def contract_of(function, rules, check=None, **example):
    return Contract(inspect.signature(function).parameters, rules, check, example)


def product(a, b, bias=None, kind="x", count=1, fast: bool = False): ...


RULES = {
    "a": Operand("M K", torch.float32, contiguous=True),
    "b": Operand("N K", like="a"),
    "bias": Scale("N"),
    "kind": OneOf("x", "y"),
    "count": Between(1, 4),
}


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (([2, 3], [4, 5]), ShapeMismatchError, r"b.shape=\(4, 5\): expected \[N, K\] with .*K=3"),
        (([2, 3, 1], [4, 3]), ShapeMismatchError, r"a.shape=\(2, 3, 1\): expected \[M, K\]"),
        (([2, 3], [4, 3], [5, 1]), ShapeMismatchError, r"bias.shape=\(5, 1\)"),
        (([2, 3], [4, 3], None, "z"), SchemeError, "kind='z': expected one of x, y"),
        (([2, 3], [4, 3], None, "x", 5), SchemeError, "count=5: expected 1 to 4"),
        (([2, 3], [4, 3], None, "x", float("nan")), SchemeError, "count=nan"),
        (([2, 3], [4, 3], None, "x", 1, "y"), SchemeError, "fast='y': expected one of False, True"),
    ],
)
def test_rules(args, error, words):
    contract = contract_of(product, RULES)
    values = tuple(torch.zeros(a) if isinstance(a, list) else a for a in args)
    with pytest.raises(error, match=words):
        contract.check(values)


def test_rules_about_dtype_layout_and_device():
    contract = contract_of(product, RULES)
    a, b = torch.zeros(2, 3), torch.zeros(4, 3)
    contract.check((a, b))
    contract.check((a, b, torch.ones(1), "y", 4))
    with pytest.raises(UnsupportedDtypeError, match="a.dtype=torch.float64: expected one of float"):
        contract.check((a.double(), b))
    with pytest.raises(UnsupportedDtypeError, match="b.dtype=torch.float16"):
        contract.check((a, b.half()))
    with pytest.raises(ShapeMismatchError, match="a.stride"):
        contract.check((torch.zeros(3, 2).t(), b))
    # of one column: there is no step to another
    contract.check((torch.zeros(2, 3).t()[:, :1], torch.zeros(4, 1)))
    with pytest.raises(OssFusedError, match="b.device=meta: expected cpu"):
        contract.check((a, b.to("meta")))
    for scale in (torch.ones(1), torch.ones(4, 1)):
        with pytest.raises(UnsupportedDtypeError, match="bias.dtype=torch.float64"):
            contract.check((a, b, scale.double()))
        with pytest.raises(OssFusedError, match="bias.device=meta: expected cpu"):
            contract.check((a, b, scale.to("meta")))
    with pytest.raises(TypeError, match="nobody"):
        contract_of(product, {"nobody": Scale()})


def test_an_extra_check_gets_the_arguments_that_it_names():
    seen = []
    contract = contract_of(product, RULES, lambda count, b: seen.append((count, b.shape[0])))
    contract.check((torch.zeros(2, 3), torch.zeros(4, 3)))
    assert seen == [(1, 4)]


def test_what_passed_is_not_checked_again_and_forgotten_in_time(monkeypatch):
    seen = []
    contract = contract_of(product, RULES, lambda count: seen.append(count))
    a, b = torch.zeros(2, 3), torch.zeros(4, 3)
    for count in (1, 2, 1, 2, True, [1, 2]):
        args = (a.clone(), b.clone(), None, "x", count)
        if isinstance(count, list):
            with pytest.raises(TypeError):
                contract.check(args)
        else:
            contract.check(args)
    assert seen == [1, 2, True]
    contract.check((a, b, None, "x", 1, False, {"an option": "of a kernel"}))
    # each property that a rule sees: what failed fails again
    for wrong in (a.half(), a[:, :2], torch.zeros(3, 2).t(), a.to("meta")):
        for _ in range(2):
            with pytest.raises(OssFusedError):
                contract.check((wrong, b))
    monkeypatch.setattr("oss_fused.kernels.contract._MOST_PASSED", 8)
    for rows in range(1, 50):
        contract.check((torch.zeros(rows, 3), b))
        assert len(contract._passed) <= 8


def test_leading_dimensions_are_not_part_of_the_named_ones():
    rule, dims = Operand("... H D", torch.float32), {"device": torch.device("cpu")}
    for shape in ((3,), ()):
        with pytest.raises(ShapeMismatchError, match=r"x\.shape=.*: expected \[\.\.\., H, D\]"):
            rule.check("x", torch.zeros(shape), dict(dims), {})
    rule.check("x", torch.zeros(2, 3), dims, {})


def test_codes_may_be_unpacked_on_a_cpu_only():
    rule = Operand("N K", FP8, cpu=(torch.float32,))
    with FakeTensorMode(), pytest.raises(UnsupportedDtypeError, match="b.dtype=torch.float32"):
        on_gpu = torch.zeros(2, 3, device="cuda")
        rule.check("b", on_gpu, {"device": on_gpu.device}, {})
    rule.check("b", torch.zeros(2, 3), {"device": torch.device("cpu")}, {})
    with pytest.raises(UnsupportedDtypeError, match="b.dtype=torch.bfloat16"):
        rule.check("b", torch.zeros(2, 3).bfloat16(), {"device": torch.device("cpu")}, {})


def test_lists_of_tensors_are_known_by_what_rules_see():
    def joined(x: torch.Tensor, parts: list[torch.Tensor], sizes: list[int]) -> None: ...

    seen = []
    contract = contract_of(
        joined, {"x": Operand("N", torch.float32)}, lambda parts, sizes: seen.append(sizes[0])
    )
    x = torch.zeros(3)
    for size in (1, 1, 2):
        contract.check((x, [torch.ones(2, 3), torch.zeros(4)], [size]))
    assert seen == [1, 2]
    part = torch.ones(2, 4)
    kept = weakref.ref(part)
    contract.check((x, [part, part], [2]))
    del part
    assert seen == [1, 2, 2] and kept() is None
