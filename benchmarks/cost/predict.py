"""What a merge of two models takes, by formulas: prints the tables of docs/scale.md.

    python benchmarks/cost/predict.py

A merge is a list of steps, each with its work: multiplications, numbers that are looked at,
factorised matrices, assigned entries. A machine is a list of rates. The rates of the CPU were read
off the stages of results.json; those of a GPU are published ones, and nothing was run on one.
"""

from dataclasses import dataclass, field, fields, replace

from report import table

from mergekit_rotation.symmetry.experts import AFFORDABLE
from mergekit_rotation.symmetry.experts import WIDTH as SKETCH
from mergekit_rotation.symmetry.head_gram import columns
from mergekit_rotation.symmetry.nearest import FIRST as FEW

#: how two models are related: same lineage, the same in other coordinates, independent
KINDS = ("near", "twin", "other")

# -- what the solvers do, beside what mergekit_rotation.symmetry has as constants ------------------

#: how often the best element of every pair of key/value heads is found for independent models,
#: where the order of query heads is to be found as well
ALTERNATIONS = 4
#: what the singular values alone take of a decomposition (docs/cost.md)
VALUES = 0.4
#: how often each number of a layer is looked at: checked, compared, normed, moved, by kind
PASSES = {"near": 5, "twin": 11, "other": 11}
#: how often each bound of the score of two neurons is looked at, by kind
LOOKS = {"near": 1, "twin": 2, "other": 1}


@dataclass
class Work:
    """Work of one step.

    Attributes
    ----------
    products : float
        Multiplications and additions in float32.
    exact : float
        The same of numbers stored in bfloat16, which matrix units multiply exactly.
    passes : float
        Numbers of two bytes that are read, raised to float32 and used.
    scores : float
        Scores of neurons or heads that are looked at.
    svd : dict of int to float
        Singular value decompositions in float64 by size.
    assigned : float
        Entries of matrices that are assigned from few of them.
    merged : float
        Numbers that mergekit averages.
    read, written : float
        Bytes of files.
    calls : float
        Layers whose heads take a few hundred small calls, however small they are.
    """

    products: float = 0.0
    exact: float = 0.0
    passes: float = 0.0
    scores: float = 0.0
    svd: dict[int, float] = field(default_factory=dict)
    assigned: float = 0.0
    merged: float = 0.0
    read: float = 0.0
    written: float = 0.0
    calls: float = 0.0

    def times(self, count: float) -> "Work":
        """Return this work done several times."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "svd"}
        svd = {size: count * number for size, number in self.svd.items()}
        return Work(**{name: count * x for name, x in numbers.items()}, svd=svd)


@dataclass(frozen=True)
class Machine:
    """Rates; seconds per unit of `Work`, those of an SVD over the cube of its size."""

    name: str
    products: float
    exact: float
    passes: float
    scores: float
    svd: float
    assigned: float
    merged: float
    read: float
    written: float
    calls: float
    memory: float  # bytes that hold what one step works on

    def seconds(self, work: Work) -> float:
        """Return how long a step takes."""
        kinds = (f.name for f in fields(Work) if f.name != "svd")
        total = sum(getattr(work, kind) * getattr(self, kind) for kind in kinds)
        return total + sum(number * self.svd * size**3 for size, number in work.svd.items())


#: One core of an Intel Xeon with AMX (results.json: 1 thread). Rates are those of stages: products
#: of matrices, passes of `check` and `compare` of the Llama-8B layers, scores of their
#: `neurons: few columns` less its products, SVD of `heads: SVD` at size 128, assignments of
#: independent neurons, `merge` and `write` of the Llama-8B layers, calls of the
#: heads of SmolLM2-135M. Files lay in the page cache: reading costs nothing.
CPU = Machine(
    "one core",
    products=1 / 130e9,
    exact=1 / 350e9,
    passes=0.3e-9,
    scores=0.5e-9,
    svd=1.8e-9,
    assigned=2.3e-8,
    merged=6.5e-9,
    read=0.0,
    written=1 / 0.4e9,
    calls=0.015,
    memory=24e9,
)

#: The data sheet of an H100 SXM: 67 TFLOP/s in float32, 3.35 TB/s; a PCIe 5 SSD of 10 GB/s, which
#: is slower than the bus. Half of each is taken as reached. A number is read in two bytes and used
#: in four; a score is written and read in four. SVD: no rate is published for batches of this size;
#: that of one core is taken. Assignment: the sparse solver runs on the CPU. Calls take as long.
GPU = Machine(
    "one H100",
    products=2 / 67e12,
    exact=2 / 67e12,
    passes=2 * 6 / 3.35e12,
    scores=2 * 8 / 3.35e12,
    svd=CPU.svd,
    assigned=CPU.assigned,
    merged=2 * 12 / 3.35e12,
    read=2 / 10e9,
    written=2 / 10e9,
    calls=CPU.calls,
    memory=80e9,
)


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer.

    Attributes
    ----------
    width : int
        Of the residual stream.
    legs : tuple of (heads, size, length)
        Matrices of the heads that are rotated: as many heads, of this size, times a length.
    kv : int
        Heads that have a rotation of their own.
    free : tuple of int
        Sizes of the rotations that take an SVD, per head (those of rotary heads do not).
    neurons : int
        In one expert.
    matrices : int
        Of one neuron: 3 where it is gated.
    experts : int
    other : int
        Numbers that no symmetry of heads or neurons moves.
    half : bool
        Whether they are stored in bfloat16.
    """

    width: int
    legs: tuple[tuple[int, int, int], ...]
    kv: int
    free: tuple[int, ...]
    neurons: int
    matrices: int = 3
    experts: int = 1
    other: int = 0
    half: bool = True

    @property
    def length(self) -> int:
        """Numbers of one neuron."""
        return self.matrices * self.width

    @property
    def rotary(self) -> bool:
        """Whether queries and keys, the first two legs, are turned in planes only."""
        return len(self.free) == 1

    @property
    def alternations(self) -> int:
        """How often a pair of independent heads is solved, if not by its singular values."""
        return ALTERNATIONS if self.legs[0][0] > self.kv else 1

    def decompositions(self, kind: str) -> float:
        """Return how many decompositions each of its rotations takes."""
        pairs = self.kv**2 * (self.alternations if self.alternations > 1 else VALUES)
        return {"near": 0.0, "twin": float(self.kv), "other": pairs + self.kv}[kind]

    @property
    def heads(self) -> int:
        """Numbers of the heads."""
        return sum(heads * size * length for heads, size, length in self.legs)

    @property
    def numbers(self) -> int:
        """Numbers of the layer."""
        return self.heads + self.experts * self.neurons * self.length + self.other

    def work(self, kind: str) -> dict[str, Work]:
        """Return what aligning the layer takes, by step."""
        heads = Work(calls=1.0)
        for position, (h, size, length) in enumerate(self.legs):
            cell = 2 if self.rotary and position < 2 else size
            s = length if kind == "other" else columns(length, cell)
            bound = float(h * h * cell**2 * s)
            # Gram matrices of columns give Frobenius norms; blocks of pairs are looked at as well.
            norms = float(2 * h * cell * s**2 + h * h * s**2)
            by_norms = s < length and norms <= bound
            heads.products += 2 * size // cell * (norms if by_norms else bound)
            heads.scores += 0.0 if by_norms else float(h * h * size * cell)
            tried = self.kv * self.alternations if kind == "other" else 1
            heads.products += 2.0 * h * size**2 * length * tried
        count = self.decompositions(kind)
        heads.svd = {size: count * self.free.count(size) for size in self.free}
        n = self.neurons
        done = [Work(products=2.0 * n * n * FEW, scores=float(LOOKS[kind] * n * n))]
        if kind == "other":
            every = 2.0 * n * n * self.length
            done.append(Work(exact=every) if self.half else Work(products=every))
            done.append(Work(assigned=float(n * n)))
        times = self.experts * (2 if self.experts > 1 and kind != "near" else 1)  # there and here
        neurons = _sum(done).times(times)
        if self.experts > 1:
            compared = self.experts**2 * n**2 * float(self.length + n)
            sketch = 4.0 * self.experts * n * self.length * SKETCH
            neurons.products += min(2 * compared, sketch) if compared <= AFFORDABLE else sketch
        passes = Work(passes=float(PASSES[kind] * 2 * self.numbers))
        return {"heads": heads, "neurons": neurons, "passes": passes}

    def memory(self, kind: str) -> float:
        """Return the bytes that aligning its largest block takes, with what it starts from."""
        n, block = self.neurons, self.experts * self.neurons * self.length
        scores = 4.0 * n * n if kind == "other" else 8.0 * n * FEW
        return max(6.0 * block + scores, 14.0 * self.heads)

    def stream_memory(self) -> float:
        """Return the bytes of a group while a map of the stream is solved: six float32 copies."""
        block = self.experts * self.neurons * self.length
        return 24.0 * max(block, self.heads) + 64.0 * self.width**2


@dataclass(frozen=True)
class Model:
    """Layers (each as often as it is there), and numbers outside of them."""

    name: str
    layers: tuple[tuple[int, Layer], ...]
    outside: float

    @property
    def numbers(self) -> float:
        """All numbers."""
        return self.outside + sum(count * layer.numbers for count, layer in self.layers)

    def plain(self) -> Work:
        """Return what `linear` takes for two models in bfloat16."""
        return Work(read=4 * self.numbers, written=2 * self.numbers, merged=self.numbers)

    def aligned(self, kind: str) -> dict[str, Work]:
        """Return what alignment adds, by step."""
        steps: dict[str, list[Work]] = {"outside": [Work(passes=4 * self.outside)]}
        for count, layer in self.layers:
            for step, work in layer.work(kind).items():
                steps.setdefault(step, []).append(work.times(count))
        return {step: _sum(works) for step, works in steps.items()}

    def seconds(self, kind: str, machine: Machine) -> tuple[float, float]:
        """Return the seconds of `linear`, and of `rotation_linear`."""
        plain = machine.seconds(self.plain())
        return plain, plain + sum(map(machine.seconds, self.aligned(kind).values()))

    def memory(self, kind: str) -> float:
        """Return the bytes of the largest block while it is aligned."""
        return max(layer.memory(kind) for _, layer in self.layers)


def _sum(works: list[Work]) -> Work:
    total = Work()
    for work in works:
        for f in fields(Work):
            if f.name != "svd":
                setattr(total, f.name, getattr(total, f.name) + getattr(work, f.name))
        for size, number in work.svd.items():
            total.svd[size] = total.svd.get(size, 0.0) + number
    return total


def grouped(
    width: int,
    heads: int,
    kv: int,
    size: int,
    neurons: int,
    rotary: bool = True,
    gated: bool = True,
) -> Layer:
    """Return a layer with grouped queries."""
    legs = ((heads, size, width), (kv, size, width), (kv, size, width), (heads, size, width))
    free = (size,) if rotary else (size, size)
    return Layer(width, legs, kv, free, neurons, 3 if gated else 2)


def latent(neurons: int, experts: int = 1, other: int = 0) -> Layer:
    """Return a layer of DeepSeek-V2: 128 heads, keys and values from 512 numbers."""
    legs = ((128, 128, 1536), (128, 128, 512), (128, 128, 512), (128, 128, 5120))
    rest = 128 * 64 * 1536 + 5120 * (1536 + 512 + 64) + other
    return Layer(5120, legs, 128, (128, 128), neurons, experts=experts, other=rest)


BERT = replace(grouped(768, 12, 12, 64, 3072, rotary=False, gated=False), half=False)
LLAMA = grouped(4096, 32, 8, 128, 14336)
SHARED = 2 * 1536 * 3 * 5120
#: what results.json has figures of
MEASURED = {
    "SmolLM2-135M": Model("SmolLM2-135M", ((30, grouped(576, 9, 3, 64, 1536)),), 28.3e6),
    "Gemma 3 270M": Model("Gemma 3 270M", ((18, grouped(640, 4, 1, 256, 2048)),), 167.8e6),
    "Llama-8B layers": Model("Llama-8B layers", ((4, LLAMA),), 8.4e6),
}
LARGE = (
    Model("Llama-3 8B", ((32, LLAMA),), 1.05e9),
    Model("Llama-3 70B", ((80, grouped(8192, 64, 8, 128, 28672)),), 2.1e9),
    Model("DeepSeek-V2", ((1, latent(12288)), (59, latent(1536, 160, SHARED))), 1.05e9),
)


def predictions(machine: Machine) -> list[str]:
    """Return the predictions for large models in Markdown."""
    head = ["model, GB", "related by", "`linear`", "heads", "neurons", "passes", "ratio", "block"]
    rows = []
    for model in LARGE:
        for kind in KINDS:
            plain, aligned = model.seconds(kind, machine)
            steps = {s: machine.seconds(w) for s, w in model.aligned(kind).items()}
            passes = steps["passes"] + steps["outside"]
            cells = [plain, steps["heads"], steps["neurons"], passes]
            block = model.memory(kind)
            rows.append(
                [
                    f"{model.name}, {2 * model.numbers / 1e9:.0f}",
                    {"near": "lineage", "twin": "coordinates", "other": "nothing"}[kind],
                    *map(_time, cells),
                    f"{aligned / plain:.1f}",
                    f"{block / 1e9:.1f} GB" + (" !" if block > machine.memory else ""),
                ]
            )
    return table(head, rows)


def _time(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


if __name__ == "__main__":
    for machine in (CPU, GPU):
        print(f"On {machine.name}:\n")
        print("\n".join(predictions(machine)) + "\n")
    for model in LARGE:
        stream = max(layer.stream_memory() for _, layer in model.layers)
        print(f"{model.name}: solving a map of the stream holds {stream / 1e9:.0f} GB")
