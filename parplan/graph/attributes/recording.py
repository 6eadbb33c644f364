"""Python attributes of modules while a model is captured: which ones the forward reads, and which ones it writes.

torch.export sees tensors only. A number, a flag or a configuration that the forward reads becomes a constant of the
graph, so it is recorded here, for a later call to see whether it still is what it was
(parplan/graph/attributes/guards.py). A tensor that the forward leaves on a module becomes one more result of the graph,
which the runtime puts there at every call. Everything else that the forward writes is refused, as a captured graph
would do it once and never again; and nothing of the capture stays on the modules.
"""

from __future__ import annotations

import io
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from parplan.compat import HOOK_FIELDS, pytree, traced_node
from parplan.errors import CaptureError
from parplan.graph.attributes.first_call import Change, refusal
from parplan.graph.attributes.guards import ClassPlace, Computed, Entry, Guards
from parplan.graph.attributes.held_values import (
    LIMIT,
    MISSING,
    PLAIN,
    Held,
    PlainTensor,
    contents,
    is_watched,
    name_of,
    same,
    walk,
)  # fmt: skip
from parplan.graph.attributes.input_checks import InputCheck
from parplan.graph.attributes.named_values import NamedValues, attributes_named, class_values, outside_values
from parplan.graph.attributes.number_inputs import Number
from parplan.graph.attributes.stored_results import Stored, Template
from parplan.graph.attributes.surroundings import (
    MODES,
    OF_MODULES,
    HostReads,
    RandomNumbers,
    seen_attributes,
    seen_modes,
)  # fmt: skip

__all__ = ["Recorder", "recorded"]


@dataclass
class _Module:
    """A module's attributes before the forward."""

    name: str
    module: nn.Module
    place: dict[str, Any]
    before: dict[str, Any]
    hooked: frozenset[str]

    def path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


class Recorder:
    """Records one forward of `model`.

    Attributes:
        stored: what it leaves on the modules, in the order of the extra results.
        host_reads: whether it reads numbers of tensors on the host.
        changes: settings that it reads and changes, and hooks that it registers.
    """

    def __init__(self, model: nn.Module, numbers: Sequence[Number] = ()) -> None:
        self._model = model
        self._numbers = numbers
        self._modules: dict[int, _Module] = {}
        self._read: dict[tuple[int, Hashable], Entry] = {}
        self._held: dict[int, Held] = {}
        self._tensors: dict[int, PlainTensor] = {}
        self._written: dict[str, set[Hashable]] = defaultdict(set)
        self._decides: set[int] = set()
        self._named = NamedValues(self._held)
        self._kinds: set[type] = set()
        self._outside: list[Entry] = []
        self._active = False
        self._random: RandomNumbers | None = None
        self._held_by: dict[int, tuple[nn.Module, str, dict[Any, Any], dict[Any, Any]]] = {}
        self.host_reads = HostReads(partial(is_watched, self._tensors, self._decides))
        self.stored: list[Stored] = []
        self.changes: list[Change] = []
        self._unread: list[Change] = []

    @property
    def guards(self) -> Guards:
        """Guards on all values that the forward has read."""
        # Of which tensor a number came is not known.
        tensors = self._tensors.values() if self.host_reads.any else ()
        versions = [
            Entry(t.path, Computed(partial(getattr, t.tensor, "_version")), "_version", t.version) for t in tensors
        ]
        for known in (self._tensors[key] for key in self._decides if key in self._tensors):
            if known.values is not None:  # written through `.data`, a view or NumPy, no version tells of it
                same_values = Computed(partial(torch.equal, known.tensor, known.values))
                versions.append(Entry(known.path, same_values, "values", True))
        written = {path: frozenset(keys) for path, keys in self._written.items()}
        for number in self._numbers:
            written[number.holder] = written.get(number.holder, frozenset()) | {number.keys[-1]}
        inputs = {(id(number.place), number.keys[-1]) for number in self._numbers if not number.holder}
        read = [entry for key, entry in self._read.items() if key not in inputs]
        # Modules that are not parts of the model; one that the forward has made may have been written since.
        kinds = {*self._kinds, *(type(held.container) for held in self._held.values())}
        read += [entry for kind in kinds if not issubclass(kind, nn.Module) for entry in class_values(kind)]
        read += [entry for entry in self._outside if entry.place.get(entry.key, MISSING) is entry.value]
        return Guards((*read, *versions), written, self._numbers)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook of the whole model."""
        for name, part in self._model.named_modules(remove_duplicate=False):
            # Attributes that hooks of torch's own set before every forward: a weight with its norm, pruned or not.
            hooks = (hook for hook in part._forward_pre_hooks.values() if type(hook).__module__.startswith("torch."))
            written = (getattr(hook, field_name, None) for hook in hooks for field_name in ("name", "_tensor_name"))
            hooked = frozenset(name for name in written if isinstance(name, str))
            place = part.__dict__
            self._modules.setdefault(id(place), _Module(name, part, place, dict(place), hooked))
            for fields in (*HOOK_FIELDS, "_modules"):
                if isinstance(place.get(fields), dict):
                    self._held_by.setdefault(id(place[fields]), (part, fields, place[fields], dict(place[fields])))
        leaves = enumerate(pytree.tree_leaves((args, kwargs)))
        found = ((index, traced_node(leaf)) for index, leaf in leaves if isinstance(leaf, Tensor))
        self.host_reads.inputs = {known[0]: index for index, known in found if known is not None}
        self._active = self.host_reads.on = True
        self._random = RandomNumbers()
        # torch has looked the model's own forward up before its hooks are called.
        kind, own = next(kind for kind in type(module).__mro__ if "forward" in vars(kind)), module.__dict__
        if "forward" in own or not kind.__module__.startswith("torch."):
            self.read(own, "forward", own.get("forward", MISSING))
            self.read_of_class(module.__dict__, kind, "forward")
        for known in list(self._modules.values()):
            kinds = type(known.module).__mro__
            if any("__getattribute__" in vars(kind) for kind in kinds if kind not in (nn.Module, object)):
                self.read_all(known.place)

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Hook of the whole model: results and what it has left on the modules."""
        self._active = self.host_reads.on = False
        try:
            self._end_random()
            extra = [tensor for write in self._writes() for tensor in self._taken(*write, (args, kwargs))]
            self.changes += self._unread if self.changes else []
            for module, fields, place, before in self._held_by.values():
                known = self._modules[id(module.__dict__)]
                for key in before.keys() - place.keys():
                    raise refusal(known.path(key if fields == "_modules" else fields), "takes a module or a hook away")
                for key in (key for key, now in place.items() if before.get(key, MISSING) is not now):
                    path = known.path(key if fields == "_modules" else fields)
                    self.changes.append(Change(path, module, (fields, key), before.get(key, MISSING), place[key]))
        finally:
            self.restore()
        return (output, extra) if extra else output

    def _end_random(self) -> None:
        drawn, self._random = self._random, None
        if drawn is not None:
            drawn.end()

    def restore(self) -> None:
        """Put all attributes back."""
        self._active = self.host_reads.on = False
        for known in self._modules.values():
            for key in (known.place.keys() | known.before.keys()) - OF_MODULES:
                if key not in known.before:
                    del known.place[key]
                elif known.place.get(key, MISSING) is not known.before[key]:
                    known.place[key] = known.before[key]
        for _, fields, place, before in self._held_by.values():
            for key in place.keys() - before.keys():
                del place[key]
            if fields == "_modules" and place != before:  # hooks that are gone are those of the capture itself
                place.clear()
                place.update(before)
        self._named.restore()
        for held in self._held.values():
            if not held.unchanged and not same(held.container, held.container, self._held):
                held.restore()

    def close(self) -> None:
        """The capture is over, perhaps in the middle of a forward that has failed."""
        self.restore()
        self._held_by.clear()  # it has the capture's own hooks, and these have the recorder
        with torch.no_grad():
            for known in self._tensors.values():
                if known.tensor._version != known.version and known.values is not None:
                    known.tensor.detach().copy_(known.values)
        with suppress(CaptureError):
            self._end_random()

    def read(self, place: Any, key: str, value: Any, module: nn.Module | None = None) -> None:
        """The forward reads an attribute of a module, or finds that it is not there."""
        if not self._active or (id(place), key) in self._read:
            return
        known = self._modules.get(id(place))
        if known is None:
            self._outside += outside_values(module, key, value) if module is not None else ()
            return
        if known.before.get(key, MISSING) is not value:
            return  # the forward has written it before
        if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
            raise CaptureError(
                f"the forward reads {known.path(key)}, an iterator, from which a captured model would take once and "
                "not at every call; take from it outside of the forward and pass the value as an argument"
            )
        self._note(known.path(key), place, key, value)

    def is_part(self, place: Any) -> bool:
        """Whether a module with these attributes is a part of the model."""
        return id(place) in self._modules

    def read_all(self, place: Any) -> None:
        """The forward looks at all attributes of a module (`self.__dict__`, `vars(self)`)."""
        known = self._modules.get(id(place))
        if known is not None and self._active:
            for key in known.before.keys() - OF_MODULES:
                if place.get(key, MISSING) is known.before[key]:
                    self._note(known.path(key), place, key, known.before[key])
            names = known.before.keys() - OF_MODULES
            same_names = Computed(lambda: place.keys() - OF_MODULES == names)
            self._read[id(place), ""] = Entry(known.path("__dict__"), same_names, "", True)

    def read_of_class(self, place: Any, kind: type, key: str) -> None:
        """The forward reads an attribute of a module's class."""
        known = self._modules.get(id(place))
        value = vars(kind)[key]
        if not self._active or known is None or key in known.place:
            return
        owner, named = type(known.module), attributes_named(value)
        for entry in self._named.of(value, owner):
            self._add(entry)
        if named is not None and not named.isdisjoint(("__getattribute__", "getattr_static")):
            self.read_all(place)
        plain = isinstance(value, (*PLAIN, list, tuple, dict, set, frozenset))
        if plain or key == "forward" or not kind.__module__.startswith("torch."):
            self._note(known.path(key), place, key, MISSING)
        if plain or named is not None:
            self._note(known.path(key), ClassPlace(owner), key, value)

    def read_mode(self, name: str, value: bool) -> None:
        """The forward asks for one of torch's modes."""
        if self._active:
            self._read[0, name] = Entry(f"torch.{name}()", Computed(MODES[name]), name, value)

    def _add(self, entry: Entry) -> bool:
        """Whether an entry is a new one: modules of one class share what they read of it."""
        place = entry.place.kind if isinstance(entry.place, ClassPlace) else entry.place
        return self._read.setdefault((id(place), entry.key), entry) is entry

    def _note(self, path: str, place: Any, key: str, value: Any) -> None:
        if not self._add(Entry(path, place, key, value)):
            return
        for entry in self._named.of(value):
            self._add(entry)
        if len(self._held) == LIMIT:
            warnings.warn(
                f"{type(self._model).__name__}: of what its forward reads from {path} on, changes are not seen: "
                f"its attributes hold more than {LIMIT} lists, dictionaries and objects",
                stacklevel=2,
            )
        for inner, leaf in walk(path, value, self._held):
            self._kinds.add(leaf if isinstance(leaf, type) else type(leaf))  # a class may be the configuration
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                self._tensors[id(leaf)] = PlainTensor.of(inner, leaf)

    def is_untouched(self, module: nn.Module) -> bool:
        """Whether a module of the model and its parts have the attributes that they had before the forward."""
        known = (self._modules.get(id(part.__dict__)) for part in module.modules())
        return all(
            one is not None
            and one.place.keys() == one.before.keys()
            and all(one.place[key] is value for key, value in one.before.items())
            for one in known
        )

    def reads_alike(self, one: nn.Module, other: nn.Module) -> bool:
        """Whether what the forward has read so far of a module and its parts has the same value in another one."""
        parts = zip(one.modules(), other.modules(), strict=True)
        twins = {id(mine.__dict__): theirs.__dict__ for mine, theirs in parts}
        read = [(twins[place], str(key), entry.value) for (place, key), entry in self._read.items() if place in twins]
        return all(same(place.get(key, MISSING), value, self._held) for place, key, value in read)

    def read_like(self, one: nn.Module, other: nn.Module) -> None:
        """The forward would read of a module and its parts what it has read of another one, and is not run."""
        parts = zip(one.modules(), other.modules(), strict=True)
        twins = {id(mine.__dict__): theirs.__dict__ for mine, theirs in parts}
        for place, key in [found for found in self._read if found[0] in twins]:
            self.read(twins[place], str(key), twins[place].get(str(key), MISSING))

    @property
    def left(self) -> list[tuple[str, int, Any]]:
        """Values that the forward leaves on modules: the path, the number of tensors, and what is none."""
        return [(one.path, one.count, one.template.leaves) for one in self.stored]

    def stores_like(self, other: Recorder) -> bool:
        """Whether two forwards leave the same beside their tensors, and read and assert the same values on the host."""
        reads, twins = self.host_reads, other.host_reads
        same = len(reads.checks) == len(twins.checks) and reads.constants == twins.constants
        return self.left == other.left and same and not any(check.fixed for check in self.checks_beside(other))

    def checks_beside(self, twin: Recorder | None) -> tuple[InputCheck, ...]:
        """The assertions on inputs; those are fixed that a twin for another number of samples does not have too."""
        checks, others = self.host_reads.checks, twin.host_reads.checks if twin is not None else []
        pairs = zip_longest(checks, others[: len(checks)])
        return tuple(replace(one, fixed=other is None or not one.is_like(other)) for one, other in pairs)

    def check(self, exported: ExportedProgram) -> None:
        """Refuse tensors that the graph has as constants and that are not.

        Raises:
            CaptureError: the forward uses one that needs a gradient, or one that it writes.
        """
        used = {node.name for node in exported.graph.nodes if node.users}
        constants = exported.graph_signature.inputs_to_lifted_tensor_constants
        for tensor in (exported.constants[path] for name, path in constants.items() if name in used):
            if tensor.requires_grad:
                raise CaptureError(
                    f"the forward uses {self.name_of(tensor)}, of shape {tuple(tensor.shape)}, which needs a gradient "
                    "and is neither a parameter of the model nor an argument; make it an nn.Parameter (modules in "
                    "lists belong into an nn.ModuleList), or pass it as an argument"
                )

            path = self.name_of(tensor)
            if path in (one.path for one in self.stored):
                raise CaptureError(
                    f"the forward reads {path} and writes it for the next call; make it a buffer (register_buffer), "
                    "which a captured model keeps up to date"
                )

    def name_of(self, tensor: Tensor) -> str:
        """The path of a plain tensor that the forward has read, as users write it."""
        known = self._tensors.get(id(tensor))
        return known.path if known is not None else "a tensor that is not a parameter"

    def _writes(self) -> Iterator[tuple[Change, bool]]:
        """Places that the forward has written, and whether it may have read there first."""
        for known in self._modules.values():
            for field_name in ("_modules", "_parameters"):
                now, before = known.place[field_name], known.before[field_name]
                if now is not before:
                    raise refusal(known.path(field_name), "replaces it")
            for key in (k for k in known.place if k not in OF_MODULES and k not in known.hooked):
                before, now = known.before.get(key, MISSING), known.place[key]
                if now is not before and not same(now, before, self._held):
                    change = Change(known.path(key), known.module, (key,), before, now)
                    yield change, (id(known.place), key) in self._read
                elif now is before:
                    yield from self._inside(known, (key,), now, set())
            for key in known.before.keys() - known.place.keys():
                raise refusal(known.path(key), "deletes it")
        for tensor in self._tensors.values():
            if tensor.tensor._version != tensor.version:
                raise CaptureError(
                    f"the forward writes {tensor.path}, a tensor that is neither parameter nor buffer, in place; make "
                    "it a buffer (register_buffer), which a captured model keeps up to date"
                )
        for path, what in self._named.changes():
            raise refusal(path, what)

    def _inside(
        self, known: _Module, keys: tuple[Hashable, ...], value: Any, seen: set[int]
    ) -> Iterator[tuple[Change, bool]]:
        """Changes in a container that the forward has read."""
        held = self._held.get(id(value))
        if held is None or id(value) in seen:
            return
        seen.add(id(value))
        holds = contents(value) or {}
        if isinstance(value, (set, frozenset)) or (len(holds) != len(held.keys) and not isinstance(value, dict)):
            if set(holds) != set(held.keys):
                raise refusal(held.path, f"changes how much it holds, from {len(held.keys)} to {len(holds)} entries")
            return
        items = held.items
        if items.keys() - holds.keys():
            raise refusal(held.path, f"takes {sorted(map(str, items.keys() - holds.keys()))[0]} out of it")
        for key, now in holds.items():
            before = items.get(key, MISSING)
            if now is before or same(now, before, self._held):
                yield from self._inside(known, (*keys, key), now, seen)
            else:
                self._written[held.path].add(key)
                yield Change(name_of(held.path, value, key), known.module, (*keys, key), before, now), True

    def _taken(self, write: Change, is_read: bool, call: Any) -> list[Tensor]:
        """The tensors of a write, which become results."""
        template, tensors = Template.of(write.now)
        for leaf in template.leaves.values():
            if not isinstance(leaf, (*PLAIN, torch.Size)):
                raise refusal(write.path, f"leaves an object of {type(leaf).__name__} there")
        # A setting that the first forward fills in; the guard on it makes the next call another capture.
        settled = write.before is None and isinstance(write.now, (str, bool, torch.dtype, torch.device))
        if not tensors:
            (self.changes if is_read and not settled else self._unread).append(write)
        self.stored.append(Stored(write.path, write.module, write.keys, template, len(tensors)))
        # A result of its own, also where an input or a parameter is stored as it is.
        given = {id(leaf) for leaf in pytree.tree_leaves(call)} | {id(p) for p in self._model.parameters()}
        given |= {id(b) for b in self._model.buffers()}
        return [tensor.clone() if id(tensor) in given else tensor for tensor in tensors]


@contextmanager
def recorded(model: nn.Module, numbers: Sequence[Number] = ()) -> Iterator[Recorder]:
    """While it lasts, reads of attributes of modules are recorded, and what one forward of `model` writes is found.

    Raises:
        CaptureError: the forward writes what no captured graph can keep up.
    """
    recorder = Recorder(model, numbers)
    with (
        closing(recorder),
        model.register_forward_pre_hook(recorder.enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(recorder.leave, with_kwargs=True),
        seen_attributes(recorder),
        seen_modes(recorder.read_mode),
        recorder.host_reads,
    ):
        yield recorder
