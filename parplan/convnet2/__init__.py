"""cuda-convnet2's layer files: read into a torch module and pins, so that plans, checks and runs need no rewriting."""

from __future__ import annotations

from parplan.convnet2.network import ConvNet
from parplan.convnet2.rates import Rates, Schedule
from parplan.convnet2.reader import LayerFile, read

__all__ = ["ConvNet", "LayerFile", "Rates", "Schedule", "read"]
