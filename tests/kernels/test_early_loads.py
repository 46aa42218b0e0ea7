# SPDX-License-Identifier: MIT
"""What kernels read before they wait for the kernels ahead (programmatic dependent launch).

On any machine: the kernels' source, walked through their helpers, and the code that Triton makes.
On a GPU: an operand is rewritten by a slow kernel that lets the next one start at once, in a graph
that is replayed with other contents each time.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from moe_layer import Layer

import oss_fused
import oss_fused.kernels
from oss_fused.kernels.gemm.triton import PREFETCHING, kernels
from oss_fused.kernels.launch import runs_gluon

PACKAGE = Path(oss_fused.__file__).parent
SOURCES = PACKAGE / "kernels"
ops = torch.ops.oss_fused
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16

_WEIGHT = "a weight, where the caller vouches for it"
_TABLE = "made before the step, where the caller vouches for it"
_ROUTED = "gate_up waited for the routing before it let this kernel start"
# (kernel, function that loads, pointer or descriptor) -> why it may come before the wait
ALLOWED = {
    ("attention.triton._decode_attention_kernel", "_decode_attention_kernel", "seq_lens"): _TABLE,
    ("attention.triton._decode_attention_kernel", "_rows", "table"): _TABLE,
    ("gemm.gemv._gemv_kernel", "_gemv_kernel", "rows_b"): _WEIGHT,
    ("gemm.gemv._gemv_kernel", "_gemv_kernel", "b_scale"): _WEIGHT,
    ("gemm.gemv._gemv_kernel", "_gemv_kernel", "bias"): _WEIGHT,
    ("gemm.cooperative._gemm_cooperative_kernel", "_request_columns", "b_desc"): _WEIGHT,
    ("gemm.cooperative._gemm_cooperative_kernel", "_request_columns", "c_desc"): _WEIGHT,
    ("gemm.stream._gemm_stream_kernel", "_load", "b_desc"): _WEIGHT,
    ("gemm.stream._gemm_stream_kernel", "_load", "a_desc"): "a box outside of a: nothing is read",
    ("gemm.stream._gemm_stream_kernel", "_multiply", "b_scale"): _WEIGHT,
    ("gemm.stream._gemm_stream_kernel", "_multiply", "bias"): _WEIGHT,
    ("gemm.swap._gemm_swap_kernel", "_gemm_swap_kernel", "b_scale"): _WEIGHT,
    ("gemm.swap._gemm_swap_kernel", "_gemm_swap_kernel", "bias"): _WEIGHT,
    # the pipeline is that of gemm.cooperative; this kernel's launch allows no prefetch
    ("mlp.gated_cooperative._gated_cooperative_kernel", "_request_columns", "b_desc"): _WEIGHT,
    ("mlp.gated_cooperative._gated_cooperative_kernel", "_request_columns", "c_desc"): _WEIGHT,
    ("moe.gemm._down_kernel", "_down_kernel", "tiles"): _ROUTED,
    ("moe.gemm._down_kernel", "_down_kernel", "weight_scale"): _WEIGHT,
    ("moe.gemm._down_kernel", "_down_kernel", "bias"): _WEIGHT,
    ("moe.gemm._down_kernel", "_load_step", "w_ptrs"): _WEIGHT,
    ("moe.gemm._down_kernel", "_load_step", "s_ptrs"): _WEIGHT,
    ("norm.triton._add_rms_norm_quant_kernel", "_add_rms_norm_quant_kernel", "weight"): _WEIGHT,
    ("qkv.stream._qkv_kernel", "request_weights", "desc"): _WEIGHT,
    ("moe.router_norm._add_rms_norm_router_kernel", "_add_rms_norm_router_kernel", "gate"): _WEIGHT,
    (
        "moe.router_norm._add_rms_norm_router_kernel",
        "_add_rms_norm_router_kernel",
        "weight",
    ): _WEIGHT,
}
# programs that end without a wait; another program of the same launch waits
RETURNS = {"attention.triton._decode_attention_kernel": "the first split of a row always waits"}
_MODULES = ("tl", "gl", "tma")
_ACCESSES = (
    *("load", "store", "gather", "scatter", "copy_box", "store_box", "async_load", "async_store"),
    *("async_copy_global_to_shared", "async_copy_shared_to_global", "prefetch"),
)


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Sources by their path below kernels, e.g. "gemm.stream"."""
    return {
        ".".join(path.relative_to(SOURCES).with_suffix("").parts): ast.parse(path.read_text())
        for path in SOURCES.rglob("*.py")
    }


@functools.cache
def names_of(module: str) -> dict[str, tuple[str, ast.FunctionDef]]:
    """Functions of device code that ``module`` defines or imports: name -> (module, definition)."""
    found = {}
    for node in modules()[module].body:
        home = str(getattr(node, "module", "")).removeprefix("oss_fused.kernels.")
        if isinstance(node, ast.ImportFrom) and home in modules():
            theirs = names_of(home)
            found |= {a.name: theirs[a.name] for a in node.names if a.name in theirs}
        if isinstance(node, ast.FunctionDef) and any(
            ".jit" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            found[node.name] = (module, node)
    return found


def launched_early() -> set[tuple[str, str]]:
    """(module, kernel) of every launch that takes pdl_options."""
    found = set()
    for module, tree in modules().items():
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            options = {
                ast.unparse(node.targets[0])
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and "pdl_options(" in ast.unparse(node.value)
            }
            for call in ast.walk(function):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)):
                    continue
                given = {ast.unparse(k.value) for k in call.keywords if k.arg is None}
                if given & options or any("pdl_options(" in text for text in given):
                    home, kernel = names_of(module)[ast.unparse(call.func.value)]
                    found.add((home, kernel.name))
    return found


def root(node: ast.expr) -> str:
    """The name that a pointer expression starts with."""
    while not isinstance(node, ast.Name):
        part = {ast.BinOp: "left", ast.Call: "func"}.get(type(node), "value")
        node = getattr(node, part)
    return node.id


class Walk(ast.NodeVisitor):
    """Memory accesses of one kernel before its wait, and its returns without one."""

    def __init__(self, module: str, kernel: ast.FunctionDef, vouched: bool) -> None:
        self.kernel, self.vouched = f"{module}.{kernel.name}", vouched
        self.early: set[tuple[str, str, str]] = set()
        self.places: list[tuple[str, ast.FunctionDef]] = []
        self.returns = self.waited = False
        self.enter(module, kernel)
        self.returns |= not self.waited

    def enter(self, module: str, function: ast.FunctionDef) -> None:
        # a helper that calls itself is walked once
        if (module, function) in self.places:
            return
        self.places.append((module, function))
        for statement in function.body:
            self.visit(statement)
        self.places.pop()

    @property
    def place(self) -> tuple[str, ast.FunctionDef]:
        return self.places[-1]

    def branches(self, *bodies: list[ast.AST]) -> None:
        """Walk each from here; behind them only what all that go on have waited for is waited."""
        before, after = self.waited, []
        for body in bodies:
            self.waited = before
            for node in body:
                self.visit(node)
            if not (body and isinstance(body[-1], ast.Return)):
                after.append(self.waited)
        self.waited = all(after)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.branches(node.body, node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        # a loop may have no turn
        self.branches(node.body, [])

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        if f"{self.place[0]}.{self.place[1].name}" == self.kernel:
            self.returns |= not self.waited

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else root(node.func)
        if name == "warp_specialize":
            parts = [pair.elts[0].id for pair in node.args[0].elts]
            self.branches(*([ast.Call(ast.Name(part), [], [])] for part in parts))
        elif name == "wait_for_inputs":
            self.waited = True
        elif name == "wait_unless":
            self.waited |= not self.vouched
        elif isinstance(node.func, ast.Name) and name in names_of(self.place[0]):
            if name != "start_next":
                self.enter(*names_of(self.place[0])[name])
        elif not self.waited and (name in _ACCESSES or name.startswith("atomic_")):
            method = isinstance(node.func, ast.Attribute) and root(node.func) not in _MODULES
            pointer = root(node.func.value if method else node.args[0])
            self.early.add((self.kernel, self.place[1].name, pointer))


def walks(vouched: bool) -> list[Walk]:
    return [Walk(module, names_of(module)[name][1], vouched) for module, name in launched_early()]


def test_without_the_callers_word_everything_comes_after_the_wait():
    found = walks(vouched=False)
    assert len(found) >= 25
    assert set().union(*(walk.early for walk in found)) == set()
    assert [walk.kernel for walk in found if walk.returns] == []


def test_what_comes_before_the_wait_is_listed_with_its_reason():
    found = walks(vouched=True)
    assert set().union(*(walk.early for walk in found)) == set(ALLOWED)
    assert {walk.kernel for walk in found if walk.returns} == set(RETURNS)


def test_public_functions_and_modules_vouch_for_nothing():
    """An operator's default is to wait; only the layers that serve may say otherwise."""
    options = 0
    for name in {operator for operator, _, _ in _OPERATIONS.values()}:
        for argument in getattr(ops, name).default._schema.arguments:
            if argument.name.startswith("prefetch"):
                options += 1
                assert argument.default_value is False, name
    assert options == 7
    public = [PACKAGE / "functional.py", PACKAGE / "autograd.py"]
    public += [*(PACKAGE / "layers" / "hf").rglob("*.py"), *(PACKAGE / "quant").rglob("*.py")]
    assert len(public) > 10
    assert [path.name for path in public if "prefetch_" in path.read_text()] == []


_PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from oss_fused.kernels.launch import start_next, wait_for_inputs, wait_unless


@triton.jit
def kernel(x, out, PREFETCH: tl.constexpr):
    wait_unless(PREFETCH)
    value = tl.load(x)
    start_next()
    wait_for_inputs()
    tl.store(out, value + tl.load(x + 1))


for prefetch in (True, False):
    source = ASTSource(kernel, {"x": "*fp32", "out": "*fp32"}, {"PREFETCH": prefetch})
    made = triton.compile(source, GPUTarget("cuda", 90, 32), {"launch_pdl": True})
    print([w for w in made.asm["ptx"].replace(";", " ").split()
           if w.startswith(("griddepcontrol", "ld.global", "st.global"))])
"""


def test_the_wait_is_in_the_code_that_triton_makes(tmp_path):
    """Compiled for Hopper, which needs no GPU; the interpreter leaves the wait out."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    vouched, unvouched = ([w.split(".b32")[0] for w in ast.literal_eval(line)]
                          for line in done.stdout.splitlines())  # fmt: skip
    wait, load, store = "griddepcontrol.wait", "ld.global", "st.global"
    start = "griddepcontrol.launch_dependents"
    assert vouched == [load, start, wait, load, store]
    assert unvouched == [wait, load, start, wait, load, store]


@triton.jit(do_not_specialize=["count", "delay"])
def _rewrite_kernel(source, target, count, delay, BLOCK: tl.constexpr):
    """Let the next kernel start at once; after ``delay`` ns copy ``count`` bytes."""
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    begin = tl.extra.cuda.globaltimer()
    now = begin
    while now - begin < delay:
        now = tl.extra.cuda.globaltimer()
    for at in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        offset = at + tl.arange(0, BLOCK)
        value = tl.load(source + offset, mask=offset < count)
        tl.store(target + offset, value, mask=offset < count)


def as_bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def rewrite(source, target):
    count = target.numel() * target.element_size()
    _rewrite_kernel[(8,)](
        as_bytes(source), as_bytes(target), count, 20_000, BLOCK=4096, launch_pdl=True
    )


class Data:
    """Random operands on the GPU; another seed, other contents of the same shapes."""

    def __init__(self, seed):
        self.generator = torch.Generator("cuda").manual_seed(seed)

    def randn(self, *shape, dtype=BF16):
        return torch.randn(*shape, generator=self.generator, device="cuda").to(dtype)

    def scale(self, *shape):
        return torch.rand(*shape, generator=self.generator, device="cuda") + 0.5

    def integers(self, low, high, *shape, dtype=torch.int64):
        shape = {"generator": self.generator, "device": "cuda", "size": shape}
        return torch.randint(low, high, **shape).to(dtype)


def product(rows, n=2048, k=1024):
    def build(d):
        return (
            *(d.randn(rows, k, dtype=FP8), d.randn(n, k, dtype=FP8), d.scale(rows, 1)),
            *(d.scale(n, 1), d.randn(n), BF16),
        )

    return build


def linear(rows, n=2048, k=1024):
    def build(d):
        return (d.randn(rows, k), d.randn(n, k, dtype=FP8), d.scale(n, 1), None, d.randn(n))

    return build


def rope(d, rows, dim=64):
    # 4 heads of q, 2 of k and of v
    caches = [torch.zeros(4, 16, 2, dim, dtype=BF16, device="cuda") for _ in range(2)]
    slots = torch.arange(rows, device="cuda")
    table = (d.integers(0, 64, rows), d.randn(64, dim), 4, True)
    return (*table, *caches, slots, None, None, None, None, 1e-6)


def qkv(rows):
    def build(d):
        return (*product(rows, n=512)(d), *rope(d, rows))

    return build


def gated(rows, fp8):
    def build(d):
        dtype = FP8 if fp8 else BF16
        scales = [d.scale(512, 1) / 64 if fp8 else None for _ in range(2)]
        weights = [d.randn(512, 1024, dtype=dtype) for _ in range(2)]
        return (d.randn(rows, 1024), *weights, *scales, "silu", "gate")

    return build


def experts(tokens, fp8):
    def build(d):
        x, logits = d.randn(tokens, 256), d.randn(tokens, 8)
        if fp8:
            w13 = (d.randn(8, 256, 256, dtype=FP8), d.scale(8, 256, 1) / 16, d.randn(8, 256))
            w2 = (d.randn(8, 256, 128, dtype=FP8), d.scale(8, 256, 1) / 16, d.randn(8, 256))
            return (x, logits, *w13, *w2, 4, True)
        layer = Layer(256, 128, 8, d.generator.initial_seed()).to(torch.device("cuda"))
        return (x, logits, *layer.packed13, layer.b13, *layer.packed2, layer.b2, 4, True)

    return build


def attention(d):
    caches = [d.randn(8, 16, 2, 64) for _ in range(2)]
    table = torch.randperm(8, generator=d.generator, device="cuda").view(2, 4).int()
    lens = d.integers(20, 64, 2, dtype=torch.int32)
    out = torch.zeros(2, 8, 64, dtype=BF16, device="cuda")
    arrivals = torch.zeros(4, dtype=torch.int32, device="cuda")
    rest = (0.125, 0, d.randn(8), None, None, None)
    return (d.randn(2, 8, 64), *caches, table, lens, out, arrivals, *rest)


# name -> (operator, operands, those that a caller may vouch for)
_OPERATIONS = {
    **{f"fp8_gemm-{m}": ("fp8_gemm", product(m), (1, 3, 4)) for m in (1, 2, 8, 40, 300, 1100)},
    **{f"fp8_linear-{m}": ("fp8_linear", linear(m), (1, 2, 4)) for m in (1, 8, 300)},
    "quantize_fp8": ("quantize_fp8", lambda d: (d.randn(64, 1024), None, "channel"), ()),
    "quantize_fp8-static": (
        "quantize_fp8",
        lambda d: (d.randn(64, 1024), d.scale(1), "tensor"),
        (),
    ),
    "dequantize_fp8": (
        "dequantize_fp8",
        lambda d: (d.randn(64, 1024, dtype=FP8), d.scale(64, 1), BF16),
        (),
    ),
    "add_rms_norm_quant": (
        "add_rms_norm_quant",
        lambda d: (d.randn(4, 2880), d.randn(4, 2880), d.randn(2880), 1e-5, None, True),
        (2,),
    ),
    "act_mul_quant": ("act_mul_quant", lambda d: (d.randn(4, 8192), "silu", None), ()),
    **{
        f"gated_mlp-{m}-{fp8}": ("gated_mlp", gated(m, fp8), ())
        for m in (8, 300)
        for fp8 in (True, False)
    },
    "rmsnorm_rope": (
        "rmsnorm_rope",
        lambda d: (d.randn(1, 64, 1024), d.randn(1024), d.randn(64, 64), d.randn(64, 64), 1e-6),
        (),
    ),
    "rope_kv": ("rope_kv", lambda d: (d.randn(4, 512), *rope(d, 4)), ()),
    **{f"qkv_rope_kv-{m}": ("qkv_rope_kv", qkv(m), (1, 3, 4)) for m in (4, 40)},
    "add_rms_norm_router": (
        "add_rms_norm_router",
        lambda d: (
            *(d.randn(2, 2880), d.randn(2, 2880), d.randn(2880), 1e-5),
            *(d.randn(32, 2880), d.randn(32)),
        ),
        (2, 4, 5),
    ),
    "moe_route": ("moe_route", lambda d: (d.randn(4, 32), 4, True), ()),
    **{
        f"moe_mxfp4-{m}": ("moe_mxfp4", experts(m, False), (2, 3, 4, 5, 6, 7))
        for m in (1, 40, 1000)
    },
    **{f"moe_fp8-{m}": ("moe_fp8", experts(m, True), ()) for m in (1, 40)},
    "decode_attention": ("decode_attention", attention, (3, 4)),
}


def prefetch_option(operator):
    arguments = getattr(ops, operator).default._schema.arguments
    return next((a.name for a in arguments if a.name.startswith("prefetch")), None)


def compare_replays(run, build, skip=()):
    """Each operand in turn: rewritten just before ``run``, in a graph, with two contents."""
    first, second = (build(Data(seed)) for seed in (0, 1))

    def copies():
        return [a.clone() if isinstance(a, torch.Tensor) else a for a in first]

    checked = []
    for index, operand in enumerate(first):
        if index in skip or not isinstance(operand, torch.Tensor):
            continue
        contents, wanted = (operand, second[index]), []
        for content in contents:
            args = copies()
            args[index] = content.clone()
            torch.cuda.synchronize()
            wanted.append([as_bytes(t).clone() for t in run(args)])
            torch.cuda.synchronize()
        if all(torch.equal(*pair) for pair in zip(*wanted, strict=True)):
            # a cache or a result that is written and not read
            continue
        args, staged = copies(), operand.clone()
        rewrite(staged, args[index])
        run(args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rewrite(staged, args[index])
            captured = run(args)
        for turn in range(20):
            staged.copy_(contents[turn % 2])
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            same = [
                torch.equal(as_bytes(got), want)
                for got, want in zip(captured, wanted[turn % 2], strict=True)
            ]
            assert all(same), f"operand {index} of replay {turn}: stale contents were read"
        checked.append(index)
    assert checked


@pytest.mark.gpu
@pytest.mark.parametrize("vouched", [False, True])
@pytest.mark.parametrize("case", _OPERATIONS)
def test_an_operand_rewritten_just_before(case, vouched):
    """Every operand; where a caller vouches for weights or tables, every other one."""
    operator, build, trusted = _OPERATIONS[case]
    option = prefetch_option(operator)
    if vouched and option is None:
        pytest.skip("nothing to vouch for")

    def run(args):
        result = getattr(ops, operator)(*args, **({option: True} if vouched else {}))
        if result is None:
            result = args[5]
        return result if isinstance(result, tuple) else (result,)

    compare_replays(run, build, trusted if vouched else ())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemv", "large", "pingpong", "cooperative", "stream", "swap"])
@pytest.mark.parametrize("vouched", [False, True])
def test_every_product_kernel(name, vouched):
    """By name: which of them an operator takes depends on the device's table."""
    device = torch.device("cuda")
    if name not in kernels(device) or (vouched and name not in PREFETCHING):
        pytest.skip(f"no such kernel or no prefetch here; runs_gluon: {runs_gluon(device)}")
    options = {"prefetch_weights": True} if vouched else {}
    rows = {"gemv": 2, "stream": 16, "swap": 16}.get(name, 300)

    def run(args):
        *operands, dtype = args
        out = torch.empty(rows, 2048, dtype=dtype, device=device)
        kernels(device)[name](*operands, out, **options)
        return (out,)

    compare_replays(run, product(rows), (1, 3, 4) if vouched else ())
