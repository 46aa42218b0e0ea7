# SPDX-License-Identifier: MIT
"""Where a small model's work is: ``python examples/analyze_a_model.py``."""

import torch
from torch import nn

from oss_fused.analysis.access import MemoryAccessAnalyzer
from oss_fused.analysis.graph import ComputationGraphAnalyzer
from oss_fused.bench.roofline import Ceilings

model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).to("meta")
roofs = Ceilings("an H200", 4270.0, {"bfloat16": 784.0})
analyzer = ComputationGraphAnalyzer(roofs)
graph = analyzer.build_graph_from_model(model, torch.empty(8, 512, device="meta"))
for node in graph.nodes:
    print(f"{node.name} {node.type}: {node.flops} FLOPs, {node.memory} bytes")
for node in analyzer.identify_bottlenecks()["memory_bound"]:
    print(f"{node.name} waits for memory: {node.intensity:.1f} FLOPs per byte")

memory = MemoryAccessAnalyzer()
pattern = memory.analyze_tensor(torch.zeros(1024, 1024).t())
print("a transposed matrix, row by row:", pattern)
for advice in memory.suggest_optimization(pattern):
    print("-", advice)
