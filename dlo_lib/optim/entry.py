"""What the library must know about an optimiser, as data: its class, what it keeps, the temporary memory of a
step, and the forms of distribution under which it is right.

Training, profiling, sharding and the tests read an entry instead of the class.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from dlo_lib.base.errors import UserError

RATE_AND_DECAY = frozenset({"lr", "weight_decay"})
"""The settings that every optimiser of the library has."""
EMBEDDINGS = ("embed_tokens", "lm_head")
"""The modules of a model whose matrices are lists of separate vectors: the embedding and the output layer."""


class OptimizerStep(enum.Enum):
    """The implementation of the optimiser step in PyTorch. The three implementations need different temporary
    memory."""

    FUSED = "fused"
    """One kernel, without temporary memory."""
    FOREACH = "foreach"
    """One kernel per operation for all parameters, the default on CUDA. A temporary tensor has the size of
    all parameters together."""
    FOR_LOOP = "for-loop"
    """A loop over the parameters. A temporary tensor has the size of one parameter."""


class UpdateReach(enum.Enum):
    """What the update of an element depends on."""

    ELEMENT = "its own gradient and state"
    NORM = "the norm of the whole parameter"
    """Its own gradient and state, and norms of the parameter, its gradient or its update (LARS, LAMB). The
    class is a ``ForeachOptimizer`` that computes them with ``norms``."""
    PARAMETER = "the whole parameter"
    """Its rows and columns (Adafactor, SOAP)."""
    MATRIX = "the whole matrix"
    """As ``PARAMETER``, and other parameters than matrices are not possible (Muon)."""
    MODEL = "all parameters"
    """As Prodigy and L-BFGS."""


class TrainingForm(enum.Enum):
    """How a model is distributed, as far as an optimiser notices it."""

    ALONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    """Also called ZeRO stage 3."""
    TP = "tp"
    PP = "pp"
    EP = "ep"


_OWNED = frozenset(TrainingForm) - {TrainingForm.EP}
"""Where ranks hold parts, they sum the squares of norms (``parallel.whole_norms``), or each parameter has an
owner that updates all of it (``parallel.owned_params``)."""
_FLAT = frozenset({TrainingForm.ZERO1, TrainingForm.ZERO2})
_FORMS = {
    UpdateReach.ELEMENT: frozenset(TrainingForm),
    UpdateReach.NORM: _OWNED,
    UpdateReach.PARAMETER: _OWNED,
    UpdateReach.MATRIX: _OWNED,
    UpdateReach.MODEL: frozenset({TrainingForm.ALONE, TrainingForm.DDP}),
}


class ShapeRule(Protocol):
    """The shape of a state tensor, from that of its parameter."""

    def of(self, shape: Sequence[int], embedding: bool = False) -> tuple[int, ...] | None:
        """Return the shape of the state of a parameter of ``shape``; None if it has none.

        Args:
            embedding: whether the parameter is that of an embedding or of the output layer.
        """


@dataclass(frozen=True)
class ShapeBy:
    """A shape that ``compute`` gives, with the arguments of ``ShapeRule.of``."""

    compute: Callable[[tuple[int, ...], bool], tuple[int, ...] | None]

    def of(self, shape: Sequence[int], embedding: bool = False) -> tuple[int, ...] | None:
        return self.compute((*shape,), embedding)


class StateShape(enum.Enum):
    """The common shapes of state tensors: a ``ShapeRule``."""

    PARAMETER = enum.auto()
    """The shape of the parameter."""
    SCALAR = enum.auto()
    """(): such as the number of steps."""
    ROWS = enum.auto()
    """(..., rows, 1): one number for each row of a matrix; other parameters have none."""
    COLUMNS = enum.auto()
    """(..., 1, columns): one number for each column of a matrix; other parameters have none."""
    VECTOR = enum.auto()
    """The shape of a parameter with one dimension or none; matrices have no such state."""

    def of(self, shape: Sequence[int], embedding: bool = False) -> tuple[int, ...] | None:
        """Return the shape of the state of a parameter of ``shape``; None if it has none."""
        matrix = len(shape) > 1
        shapes: dict[StateShape, tuple[int, ...] | None] = {
            StateShape.PARAMETER: (*shape,),
            StateShape.SCALAR: (),
            StateShape.ROWS: (*shape[:-1], 1) if matrix else None,
            StateShape.COLUMNS: (*shape[:-2], 1, shape[-1]) if matrix else None,
            StateShape.VECTOR: None if matrix else (*shape,),
        }
        return shapes[self]


@dataclass(frozen=True)
class OptimizerState:
    """A tensor that an optimiser keeps for each parameter.

    Attributes:
        name: its key in the state of the optimiser.
        shape: its shape, from that of the parameter.
        dtype: its dtype; None for that of the parameter.
    """

    name: str
    shape: ShapeRule = StateShape.PARAMETER
    dtype: torch.dtype | None = None

    def count_bytes(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, embedding: bool = False
    ) -> int:
        """Return the bytes for a parameter of ``shape`` and ``dtype``, without a single number such as the
        step."""
        own = self.shape.of(shape, embedding)
        number = own == () and len(shape) > 0
        return 0 if own is None or number else math.prod(own) * (self.dtype or dtype).itemsize


STEP_COUNT = OptimizerState("step", StateShape.SCALAR, torch.float32)
"""The number of steps of a parameter, as PyTorch's Adam keeps it."""


Shapes = Mapping[tuple[int, ...], int]
"""How many parameters have each shape."""


@dataclass(frozen=True)
class StepMemory:
    """The temporary memory of one implementation of a step, with fp32 parameters and no weight decay. (The
    decay of SGD and of Adam needs another tensor, except in the fused step.)

    Attributes:
        of_all: bytes for each element of all parameters together.
        of_largest: bytes for each element of one parameter, while it is updated.
        of_successive: the same with what is left of the previous parameter, if both have the same size.
        of_shapes: returns the bytes of a step that depend on the shapes of the parameters, from how many
            parameters have each shape, and the number and shape of embeddings and output layers among them.
        unscales: whether the step itself divides the gradients by the scale of a ``GradScaler`` and does
            nothing after an overflow (``_step_supports_amp_scaling``).
    """

    of_all: int = 0
    of_largest: int = 0
    of_successive: int = 0
    unscales: bool = False
    of_shapes: Callable[[Shapes, Shapes], int] | None = None

    def peak(self, shapes: Shapes, embeddings: Shapes) -> int:
        """Return the bytes of temporary memory of a step.

        Args:
            shapes: how many parameters have each shape, without those of ``embeddings``.
            embeddings: the same of the embedding and the output layer.
        """
        counted = [
            (math.prod(shape), number) for some in (shapes, embeddings) for shape, number in some.items()
        ]
        every = sum(size * number for size, number in counted)
        largest = max(size for size, _ in counted)
        # Parameters of one size follow each other: the matrices of an MLP, and not the two embeddings.
        successive = max((math.prod(shape) for shape, number in shapes.items() if number > 1), default=0)
        own = 0 if self.of_shapes is None else self.of_shapes(shapes, embeddings)
        return self.of_all * every + max(self.of_largest * largest, self.of_successive * successive) + own


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimiser, as the rest of the library sees it.

    Attributes:
        cls: the class, whose arguments have PyTorch's names. It takes ``foreach`` or ``fused`` if it has this
            implementation among others.
        states: what it keeps for each parameter.
        steps: its implementations, with their temporary memory.
        settings: the arguments that a run may choose.
        options: arguments that differ from the defaults of the class.
        reach: what the update of an element depends on.
        forms: the forms of distribution under which it is right; None for those that follow from ``reach``.
        kernel: a class with the same arguments and state whose step is a kernel of this library, for
            ``--kernels fused``.
        in_backward: whether the backward updates each parameter and frees its gradient.
        embeddings: what the group of the embedding and the output layer has beside the others.
    """

    cls: type[torch.optim.Optimizer]
    states: tuple[OptimizerState, ...]
    steps: Mapping[OptimizerStep, StepMemory]
    settings: frozenset[str] = RATE_AND_DECAY
    options: Mapping[str, Any] = field(default_factory=dict)
    reach: UpdateReach = UpdateReach.ELEMENT
    forms: Collection[TrainingForm] | None = None
    kernel: type[torch.optim.Optimizer] | None = None
    in_backward: bool = False
    embeddings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def default_step(self) -> OptimizerStep:
        """The implementation with the fewest kernels."""
        return next(step for step in OptimizerStep if step in self.steps)

    def class_for(self, step: OptimizerStep, fused_kernels: bool = False) -> type[torch.optim.Optimizer]:
        """Return the class; with ``fused_kernels``, for the fused step, ``kernel`` if there is one."""
        return self.kernel if fused_kernels and self.kernel and step is OptimizerStep.FUSED else self.cls

    def arguments(self, step: OptimizerStep, **settings: Any) -> dict[str, Any]:
        """Return the keyword arguments of the class.

        Args:
            step: the implementation.
            settings: such as ``lr``; they replace ``options``.

        Raises:
            UserError: the optimiser does not have a setting.
        """
        if unknown := sorted(settings.keys() - self.settings):
            raise UserError(
                f"{self.cls.__name__} has no {', '.join(unknown)}: it has {', '.join(sorted(self.settings))}"
            )
        which = {"fused": step is OptimizerStep.FUSED, "foreach": step is OptimizerStep.FOREACH}
        taken = inspect.signature(self.cls).parameters
        flags = {name: on for name, on in which.items() if name in taken}
        kept = {name: value for name, value in self.options.items() if name not in settings}
        return {**settings, **kept, **flags}

    def count_state_bytes(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, embedding: bool = False
    ) -> int:
        """Return the bytes of state of a parameter of ``shape``, without single numbers such as the step."""
        return sum(state.count_bytes(shape, dtype, embedding) for state in self.states)

    def groups(self, named: Iterable[tuple[str, torch.Tensor]], **options: Any) -> list[dict[str, Any]]:
        """Return parameters as groups with ``options``; embeddings are a second group if they differ.

        Args:
            named: names and parameters, as ``named_parameters`` gives them.
        """
        apart, rest = list[torch.Tensor](), list[torch.Tensor]()
        for name, param in named:
            of_embedding = self.embeddings and not set(EMBEDDINGS).isdisjoint(name.split("."))
            (apart if of_embedding else rest).append(param)
        second = [{"params": apart, **options, **self.embeddings}] if apart else []
        return [{"params": rest, **options}, *second]

    def wrong_under(self, forms: Collection[TrainingForm]) -> str | None:
        """Return why the optimiser would be wrong under ``forms``, as the end of a sentence; None if it is
        right."""
        allowed = _FORMS[self.reach] if self.forms is None else self.forms
        wrong = [form.value for form in TrainingForm if form in forms and form not in allowed]
        if not wrong and self.reach is not UpdateReach.ELEMENT and TrainingForm.TP in forms:
            # the flat pieces of ZeRO are parts of the parts of tp
            wrong = [f"{form.value} with tp" for form in _FLAT if form in forms]
        if not wrong:
            return None
        if self.in_backward:
            return "updates each parameter before its gradient is averaged over ranks"
        parts = " and ".join(wrong)
        return f"updates an element by {self.reach.value}, of which a rank has a part with {parts}"
