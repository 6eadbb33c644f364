"""Captured decoders with the links of a machine, and their meshes priced and written out as plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from benchmarks.decoder import DecoderSize, captured
from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.plan import Plan
from parplan.planner.mesh.parts import Parts
from parplan.planner.mesh.plan import plan_of
from parplan.planner.mesh.search import Model, priced_mesh
from parplan.planner.mesh.step import PLAIN, Links, Mesh, Step

__all__ = ["DecoderMeshes", "Priced"]

Priced = tuple[LayerGraph, Cluster, CostModel, Plan]


@dataclass(frozen=True)
class DecoderMeshes:
    """Meshes of a decoder, captured with all of its blocks, on so many devices as the runtime uses them."""

    size: DecoderSize
    devices: int
    gpu: str = "h100-sxm"

    @cached_property
    def graph(self) -> LayerGraph:
        return captured(self.size, blocks=self.size.layers)

    @cached_property
    def model(self) -> Model:
        return Model(self.graph, self.size.layers, PLAIN)

    @cached_property
    def links(self) -> Links:
        return Links(cluster_preset(self.gpu, self.devices), by_hand=False)

    def parts(self, mesh: Mesh) -> Parts:
        return self.model.parts(self.links.cluster.first(mesh.tensor), mesh.samples)

    def step(self, mesh: Mesh, limit: float = inf) -> Step:
        found = priced_mesh(self.model, self.parts(mesh), mesh, self.links, limit)
        assert found is not None
        return found

    def plan(self, step: Step) -> Priced:
        """A mesh as a plan, with what it is priced by."""
        mesh, cluster = step.mesh, self.links.cluster
        graph = at_batch(self.graph, mesh.samples * mesh.data)
        costs = RooflineCosts(graph, cluster, "bf16", "adamw", micro_batches=mesh.micro_batches)
        return graph, cluster, costs, plan_of(graph, self.parts(mesh), step)
