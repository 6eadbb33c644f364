"""Which layer takes which: a layer file is read from top to bottom, so that a layer takes only layers above it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

from parplan.convnet2.ini import IniSection
from parplan.convnet2.layer_types import COST, check_type
from parplan.convnet2.network import Wire
from parplan.errors import LayerFileError

__all__ = ["wires_of"]

# Attributes of every network.
RESERVED = ("costs", "data", "labels", "predictions", "training", "wires")


def wires_of(sections: Mapping[str, IniSection]) -> list[Wire]:
    """Inputs of every layer, in the file's order.

    Raises:
        LayerFileError: an input that is not above, a layer that leads nowhere, a name that no module can have.
    """
    wires: list[Wire] = []
    above: list[str] = []
    for section in sections.values():
        check_type(section)
    for name, section in sections.items():
        if section.text("type") != "data":
            if "." in name or hasattr(nn.Module, name) or name in RESERVED:
                raise LayerFileError(f"{section.where}: a torch module cannot have a layer of this name; rename it")
            wires.append(Wire(name, section.names("inputs")))
            for source in wires[-1].inputs:
                if source in above and sections[source].text("type") == COST:
                    what = f"{source} is a cost, which no layer can take; take what the cost takes"
                elif source in above:
                    continue
                elif source == name:
                    what = "it takes itself; take a layer above it"
                elif source in sections:
                    what = f"{source} stands below; a layer takes layers above it only, move it up"
                else:
                    close = difflib.get_close_matches(source, above, n=1)
                    hint = f"did you mean {close[0]}?" if close else f"above are {', '.join(above) or 'none'}"
                    what = f"there is no layer {source}; {hint}"
                raise section.error("inputs", what)
            kinds = [sections[source].text("type") for source in wires[-1].inputs]
            if section.text("type") == COST and kinds != ["data", "softmax"]:
                raise section.error(
                    "inputs", "a logistic cost takes a data layer of labels and a layer of type softmax, in this order"
                )
        above.append(name)
    if any(section.text("type") == COST for section in sections.values()):
        taken = {name for wire in wires for name in wire.inputs}
        for name, section in sections.items():
            if name not in taken and section.text("type") not in (COST, "data"):
                raise section.error("type", "no layer takes what it gives; leave it out, or name it in some inputs=")
    return wires
