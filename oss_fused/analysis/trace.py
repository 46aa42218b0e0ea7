# SPDX-License-Identifier: MIT
"""Records what each module of a model computes and reads while it runs, on real or meta tensors.

Operators are counted where PyTorch dispatches them, and belong to the module that runs them: to the
leaf module, or to the stretch of a container's own forward between two of its children. Bytes are
what an ideal kernel per node moves: tensors from elsewhere read once, results that others read
written once. Rows that are looked up in a table count instead of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

aten = torch.ops.aten
Shape = tuple[int, ...]
# operators that compute nothing; of the others, elementwise ones and reductions count elements
_MOVES = {
    *(aten.clone, aten.copy_, aten._to_copy, aten.cat, aten.stack, aten.index, aten.index_select),
    *(aten.gather, aten.embedding, aten.fill_, aten.zero_, aten.empty, aten.zeros, aten.full),
    *(aten.ones, aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.arange),
    *(aten.lift_fresh, aten.new_empty, aten.new_zeros, aten.masked_fill, aten.where),
    *(aten.constant_pad_nd, aten.scatter, aten.index_put, aten.index_put_, aten.select_scatter),
    *(aten.repeat, aten.resize_, aten.set_, aten.detach_, aten.nonzero, aten.index_copy_),
    aten._unsafe_view,
}
# operators that read only some rows of their first argument
_LOOKUPS = {aten.embedding, aten.index, aten.index_select, aten.gather}


@dataclass
class GraphNode:
    """A module's call, or a container's own work between two children.

    ``output_shape`` is a shape, or a tuple of shapes where there are several outputs. ``memory`` is
    bytes that one ideal kernel moves, ``weights`` the part of it that is parameters, and
    ``eager_memory`` what the operators move one by one. ``called`` counts earlier nodes of the same
    name.
    """

    id: int
    name: str
    type: str
    input_shapes: tuple[Shape, ...] = ()
    output_shape: Any = ()
    flops: int = 0
    memory: int = 0
    weights: int = 0
    eager_memory: int = 0
    called: int = 0
    # keys of the tensors that are in ``memory`` already
    seen: set[tuple[Any, ...]] = field(default_factory=set, repr=False)

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.memory if self.memory else 0.0


class _Attention(TorchFunctionMode):
    """Counts PyTorch's fused attention as the one kernel that it is on a GPU.

    On meta tensors it would fall apart into products and a softmax.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        node = self.trace.current()
        before = node.eager_memory
        out = func(*args, **kwargs)
        tensors = (*tensors_of(args), *tensors_of(kwargs), out)
        node.eager_memory = before + sum(map(_num_bytes, tensors))
        return out


class Trace(TorchDispatchMode):
    """Nodes and edges of one run of ``model``; use as ``with trace.running(): model(x)``."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing has run yet."""
        super().__init__()
        self.model = model
        self.nodes: list[GraphNode] = []
        self.edges: set[tuple[int, int]] = set()
        self._stack: list[tuple[str, nn.Module, GraphNode | None]] = [("", model, None)]
        self._calls: dict[str, int] = {}
        # storage -> node that wrote it last
        self._writer: dict[int, GraphNode] = {}
        self._weights = {_storage(p) for p in (*model.parameters(), *model.buffers())}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Hooks on every module of the model, gone afterwards whatever happens; no gradients."""
        handles = []
        try:
            for name, module in self.model.named_modules():
                handles.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
                handles.append(
                    module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                )
            with torch.no_grad(), _Attention(self), self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            # a child ends the stretch of its parent
            parent_name, parent, _ = self._stack[-1]
            self._stack[-1] = (parent_name, parent, None)
            leaf = next(module.children(), None) is None
            node = self._new(name, module) if leaf else None
            self._stack.append((name, module, node))

        return enter

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        _, _, node = self._stack.pop()
        if node is not None and next(module.children(), None) is None:
            node.input_shapes = _shapes((args, kwargs))
            shapes = _shapes(output)
            node.output_shape = shapes[0] if len(shapes) == 1 else shapes

    def _new(self, name: str, module: nn.Module) -> GraphNode:
        called = self._calls.get(name, 0)
        self._calls[name] = called + 1
        node = GraphNode(len(self.nodes), name, type(module).__name__, called=called)
        self.nodes.append(node)
        return node

    def current(self) -> GraphNode:
        """The node that operators belong to now."""
        name, module, node = self._stack[-1]
        if node is None:
            node = self._new(name, module)
            self._stack[-1] = (name, module, node)
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if results and not _is_view(func):
            self._count(func, args, kwargs, out, results)
        return out

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any, results: list[torch.Tensor]
    ) -> None:
        node, packet = self.current(), func.overloadpacket
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        node.flops += _flops(packet, args, kwargs, out, inputs, results)
        for tensor in inputs:
            size = int(min(_num_bytes(tensor), _looked_up(packet, args, tensor, out)))
            node.eager_memory += size
            self._read(node, tensor, size)
        node.eager_memory += sum(map(_num_bytes, results))
        if not node.input_shapes:
            node.input_shapes = tuple(tuple(t.shape) for t in inputs)
        node.output_shape = tuple(results[0].shape)
        for tensor in results:
            self._writer[_storage(tensor)] = node

    def _read(self, node: GraphNode, tensor: torch.Tensor, size: int) -> None:
        storage = _storage(tensor)
        writer = self._writer.get(storage)
        key = (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        if writer is node or key in node.seen:
            return
        node.seen.add(key)
        node.memory += size
        if storage in self._weights:
            node.weights += size
        if writer is not None:
            self.edges.add((writer.id, node.id))
            self._written(writer, tensor)

    def _written(self, writer: GraphNode, tensor: torch.Tensor) -> None:
        """Count a result that somebody reads, once however many views of it are read."""
        key = ("written", _storage(tensor))
        if key not in writer.seen:
            writer.seen.add(key)
            writer.memory += _num_bytes(tensor)

    def finish(self, output: Any) -> None:
        """Count the model's outputs as written; drop what was needed to count."""
        for tensor in tensors_of(output):
            if _storage(tensor) in self._writer:
                self._written(self._writer[_storage(tensor)], tensor)
        for node in self.nodes:
            node.seen = set()
        self._writer = {}


def _flops(
    packet: Any,
    args: tuple[Any, ...],
    kwargs: Any,
    out: Any,
    inputs: list[torch.Tensor],
    results: list[torch.Tensor],
) -> int:
    """Two per multiply and add of a product; one per element of anything else that computes."""
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is aten._grouped_mm:
        return 2 * args[0].numel() * results[0].shape[-1]
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet in _MOVES or not results[0].is_floating_point():
        return 0
    x = inputs[0] if inputs else results[0]
    products = [w for w in inputs[1:] if w.dim() == 2 and w.shape[-1] == x.shape[-1] and len(w) > 1]
    if str(packet).startswith("oss_fused.") and products:
        return 2 * x.numel() * sum(len(weight) for weight in products)
    return max(tensor.numel() for tensor in (*inputs, *results) if tensor.is_floating_point())


def _looked_up(packet: Any, args: tuple[Any, ...], tensor: torch.Tensor, out: Any) -> float:
    """Bytes that an operator at most reads of one of its tensors."""
    if packet in _LOOKUPS and tensor is args[0]:
        return _num_bytes(out)
    if packet is aten._grouped_mm and tensor is args[1] and tensor.dim() == 3:
        # a token asks for one expert's weights
        return len(args[0]) * tensor[0].numel() * tensor.element_size()
    return math.inf


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension counts once."""
    sizes = (s for s, stride in zip(tensor.shape, tensor.stride()) if stride or s == 0)
    return math.prod(sizes) * tensor.element_size()


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_of(value)


def _shapes(tree: Any) -> tuple[Shape, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_of(tree))
