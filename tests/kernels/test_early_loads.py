# SPDX-License-Identifier: MIT
"""What kernels read before they wait for the kernels ahead (programmatic dependent launch).

The kernels' source is walked through their helpers, and the code that Triton makes is read. Neither
needs a GPU; test_rewritten_operands.py looks for stale reads on one.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import torch

import oss_fused
import oss_fused.kernels
from oss_fused.kernels.op import operations
from tests.kernels.hopper import run_program

PACKAGE = Path(oss_fused.__file__).parent
SOURCES = PACKAGE / "kernels"
ops = torch.ops.oss_fused

_WEIGHT = "a weight, where the caller vouches for it"
_TABLE = "made before the step, where the caller vouches for it"
_OUTSIDE = "a box outside of a: nothing is read"
_NOWHERE = "a box outside of the tensor: nothing is read"
_ROUTED = "gate_up waited for the routing before it let this kernel start"
_BEFORE = "gate_up waited for what wrote it, and w2's kernel for gate_up, before this one started"
_EXPECTED = "only L2 is asked for what follows from it, and no kernel ahead uses the memory"
_ADDED = "complete before the kernel ahead, which waited before it let this one start"
# (kernel, function that loads, pointer or descriptor) -> why it may come before the wait
ALLOWED = {
    ("attention.triton._decode_attention_kernel", "_tokens", "seq_lens"): _TABLE,
    ("attention.triton._decode_attention_kernel", "_tokens", "query_starts"): _TABLE,
    ("attention.triton._decode_attention_kernel", "load_pages", "table"): _TABLE,
    ("attention.triton._decode_attention_kernel", "logit_scale", "scales"): _WEIGHT,
    ("attention.triton._decode_attention_kernel", "_decode_attention_kernel", "scales"): _WEIGHT,
    ("attention.triton._decode_attention_kernel", "_sinks_of", "sinks"): _WEIGHT,
    ("attention.stream._attention_stream_kernel", "_length_of", "seq_lens"): _TABLE,
    ("attention.stream._attention_stream_kernel", "_pages_of", "row"): _TABLE,
    ("attention.stream._attention_stream_kernel", "_warm", "q_desc"): _NOWHERE,
    ("attention.stream._attention_stream_kernel", "_warm", "k_desc"): _NOWHERE,
    ("attention.stream._attention_stream_kernel", "_warm", "v_desc"): _NOWHERE,
    ("gemm.gemv._gemv_kernel", "_load_weights", "rows_b"): _WEIGHT,
    ("gemm.gemv._gemv_kernel", "scale_row", "scale"): _WEIGHT,
    ("gemm.gemv._gemv_kernel", "_gemv_kernel", "bias"): _WEIGHT,
    ("gemm.persistent._gemm_persistent_kernel", "_request_columns", "b_descs"): _WEIGHT,
    ("gemm.stream._gemm_stream_kernel", "_request_weights", "b_desc"): _WEIGHT,
    ("gemm.stream._gemm_stream_kernel", "load_ring", "a_desc"): _OUTSIDE,
    ("gemm.stream._gemm_stream_kernel", "scale_column", "scale"): _WEIGHT,
    ("gemm.stream._gemm_stream_kernel", "_multiply", "bias"): _WEIGHT,
    ("gemm.portable._gemm_portable_kernel", "scale_column", "scale"): _WEIGHT,
    ("gemm.portable._gemm_portable_kernel", "bias_of", "bias"): _WEIGHT,
    # the pipeline is that of gemm.persistent; this kernel's launch allows no prefetch
    ("mlp.gated_cooperative._gated_cooperative_kernel", "_request_columns", "b_descs"): _WEIGHT,
    ("mlp.gate_up_stream._gate_up_stream_kernel", "_request_weights", "b_desc"): _WEIGHT,
    ("mlp.gate_up_stream._gate_up_stream_kernel", "load_ring", "a_desc"): _OUTSIDE,
    ("mlp.gate_up_stream._gate_up_stream_kernel", "_multiply", "b_scale"): _WEIGHT,
    ("moe.combine_norm._combine_kernel", "ranked", "logits"): _BEFORE,
    ("moe.combine_norm._combine_kernel", "_slots", "summands"): _BEFORE,
    ("moe.combine_norm._combine_norm_kernel", "ranked", "logits"): _BEFORE,
    ("moe.combine_norm._combine_norm_kernel", "_slots", "summands"): _BEFORE,
    ("moe.combine_norm._combine_norm_kernel", "_combine_norm_kernel", "residual"): _BEFORE,
    ("moe.combine_norm._combine_norm_kernel", "_combine_norm_kernel", "gain"): _WEIGHT,
    ("moe.few._gate_up_few_kernel", "load_tile", "tile"): _EXPECTED,
    ("moe.few._gate_up_few_kernel", "_keys", "logits"): _EXPECTED,
    ("moe.few._down_few_kernel", "load_tile", "tile"): _ROUTED,
    ("moe.few._down_few_kernel", "_keys", "logits"): _ROUTED,
    ("moe.few._down_few_kernel", "request", "desc"): _WEIGHT,
    ("moe.few._down_few_kernel", "request", "s_desc"): _WEIGHT,
    ("moe.few._down_few_kernel", "load_chunk", "weight"): _WEIGHT,
    ("moe.few._down_few_kernel", "load_chunk", "words"): _WEIGHT,
    ("moe.few._down_few_kernel", "_down_few_kernel", "words"): _WEIGHT,
    ("moe.few._down_few_kernel", "_down_few_kernel", "bias"): _WEIGHT,
    ("moe.gemm._down_kernel", "load_tile", "tile"): _ROUTED,
    ("moe.gemm._down_kernel", "ranked", "logits"): _ROUTED,
    ("moe.gemm._down_kernel", "_load_scales", "weight_scale"): _WEIGHT,
    ("moe.gemm._down_kernel", "_load_rows", "pointer"): _WEIGHT,
    ("moe.gemm._down_kernel", "_load_step", "w_ptrs"): _WEIGHT,
    ("moe.gemm._down_kernel", "_load_step", "s_ptrs"): _WEIGHT,
    ("norm.triton._add_rms_norm_quant_kernel", "_add_rms_norm_quant_kernel", "weight"): _WEIGHT,
    ("qkv.stream._qkv_kernel", "_load_bias", "bias"): _WEIGHT,
    ("qkv.stream._qkv_kernel", "_multiply", "b_scale"): _WEIGHT,
    ("qkv.stream._qkv_kernel", "_request_weights", "b_desc"): _WEIGHT,
    ("qkv.stream._qkv_kernel", "load_ring", "a_desc"): _OUTSIDE,
    ("moe.router_norm._add_rms_norm_router_kernel", "_add_rms_norm_router_kernel", "gate"): _WEIGHT,
    ("weight_only.gemv._gemv_kernel", "_load_words", "rows_w"): _WEIGHT,
    ("weight_only.gemv._gemv_kernel", "scale_row", "scale"): _WEIGHT,
    ("weight_only.gemv._gemv_kernel", "_gemv_kernel", "bias"): _WEIGHT,
    ("weight_only.pipeline._mixed_pipeline_kernel", "_request_codes", "w_desc"): _WEIGHT,
    (
        "moe.router_norm._add_rms_norm_router_kernel",
        "_add_rms_norm_router_kernel",
        "weight",
    ): _WEIGHT,
    (
        "moe.router_norm._add_rms_norm_router_kernel",
        "_add_rms_norm_router_kernel",
        "residual",
    ): _ADDED,
    (
        "moe.router_norm._add_rms_norm_router_kernel",
        "_add_rms_norm_router_kernel",
        "gate_bias",
    ): _WEIGHT,
    ("moe.router_norm._add_rms_norm_router_kernel", "_store_logits", "target"): _EXPECTED,
}
# programs that end without a wait; another program of the same launch waits
RETURNS = {
    "attention.triton._decode_attention_kernel": "a query's first split waits; a step has a query"
}
# kernels that let the next one start before their own wait, as small ones do: what these wait for,
# the next one may not read early
STARTS_FIRST = {
    "attention.stream._attention_stream_kernel",
    "attention.triton._decode_attention_kernel",
    "attention.window._window_attention_kernel",
    "convolution.hopper_kernel.convolution_hopper_kernel",
    "convolution.transpose._transpose_kernel",
    "layer_norm.triton._layer_norm_kernel",
    "mlp.triton._act_mul_quant_kernel",
    "mlp.triton._quantize_parts_kernel",
    "moe.combine_norm._combine_kernel",
    "moe.combine_norm._combine_norm_kernel",
    "moe.encode._encode_kernel",
    "moe.place._place_and_encode_kernel",
    "moe.place._place_kernel",
    "moe.router._route_kernel",
    "moe.router_norm._add_rms_norm_router_kernel",
    "norm.triton._add_rms_norm_quant_kernel",
    "quantize.triton._quantize_row_kernel",
    "quantize.triton._quantize_static_kernel",
    "softmax.triton._softmax_kernel",
    "weight_only.parts._add_parts_kernel",
}
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
        # for each function that is being walked: had it waited where it returns?
        self.ends: list[list[bool]] = []
        self.returns = self.waited = self.starts_first = False
        self.enter(module, kernel)
        self.returns |= not self.waited

    def enter(self, module: str, function: ast.FunctionDef) -> None:
        # a helper that calls itself is walked once
        if (module, function) in self.places:
            return
        self.places.append((module, function))
        self.ends.append([])
        for statement in function.body:
            self.visit(statement)
        self.places.pop()
        self.waited = all([*self.ends.pop(), self.waited])

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
        self.ends[-1].append(self.waited)
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
        elif name == "start_next":
            self.starts_first |= not self.waited
        elif isinstance(node.func, ast.Name) and name in names_of(self.place[0]):
            self.enter(*names_of(self.place[0])[name])
        elif not self.waited and (name in _ACCESSES or name.startswith("atomic_")):
            method = isinstance(node.func, ast.Attribute) and root(node.func) not in _MODULES
            pointer = root(node.func.value if method else node.args[0])
            self.early.add((self.kernel, self.place[1].name, pointer))


def walks(vouched: bool) -> list[Walk]:
    return [Walk(module, names_of(module)[name][1], vouched) for module, name in launched_early()]


def test_without_the_callers_word_everything_comes_after_the_wait():
    found = walks(vouched=False)
    assert len(found) >= 23
    assert set().union(*(walk.early for walk in found)) == set()
    assert [walk.kernel for walk in found if walk.returns] == []


def test_what_comes_before_the_wait_is_listed_with_its_reason():
    found = walks(vouched=True)
    assert set().union(*(walk.early for walk in found)) == set(ALLOWED)
    assert {walk.kernel for walk in found if walk.returns} == set(RETURNS)


def test_which_kernels_let_the_next_one_start_before_their_wait():
    assert {walk.kernel for walk in walks(vouched=True) if walk.starts_first} == STARTS_FIRST


def test_public_functions_and_modules_vouch_for_nothing():
    """An operator's default is to wait; only the layers that serve may say otherwise."""
    options = 0
    for name in operations("torch"):
        for argument in getattr(ops, name).default._schema.arguments:
            if argument.name.startswith("prefetch"):
                options += 1
                assert argument.default_value is False, name
    assert options == 12
    public = [PACKAGE / "functional.py", PACKAGE / "autograd.py"]
    public += [*(PACKAGE / "layers" / "hf").rglob("*.py"), *(PACKAGE / "quant").rglob("*.py")]
    assert len(public) > 10
    assert [path.name for path in public if "prefetch_" in path.read_text()] == []


_PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime import driver
from oss_fused.kernels.launch import start_next, wait_for_inputs, wait_unless


class Gpu:
    def get_current_target(self):
        return target


driver.set_active(Gpu())


@triton.jit
def kernel(x, out, PREFETCH: tl.constexpr):
    wait_unless(PREFETCH)
    value = tl.load(x)
    start_next()
    wait_for_inputs()
    tl.store(out, value + tl.load(x + 1))


for capability, prefetch in ((90, True), (90, False), (89, False)):
    target = GPUTarget("cuda", capability, 32)
    source = ASTSource(kernel, {"x": "*fp32", "out": "*fp32"}, {"PREFETCH": prefetch})
    made = triton.compile(source, target, {"launch_pdl": capability == 90})
    print([w for w in made.asm["ptx"].replace(";", " ").split()
           if w.startswith(("griddepcontrol", "ld.global", "st.global"))])
"""


def test_the_wait_is_in_the_code_that_triton_makes(tmp_path):
    """Compiled for Hopper, which needs no GPU, and for Ada, which has no such instruction."""
    lines = map(ast.literal_eval, run_program(tmp_path, _PROGRAM).splitlines())
    vouched, unvouched, older = ([word.split(".b32")[0] for word in line] for line in lines)
    wait, load, store = "griddepcontrol.wait", "ld.global", "st.global"
    start = "griddepcontrol.launch_dependents"
    assert vouched == [load, start, wait, load, store]
    assert unvouched == [wait, load, start, wait, load, store]
    assert older == [load, load, store]
