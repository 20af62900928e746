"""split_module: tail(*head(x)) is module(x), whatever the module is made of."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_npu.compile.split import split_module
from lightning_npu.errors import CompileError, InputError

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    tokens: Tensor
    pooled: Tensor | None = None


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.down = None if stride == 1 and channels_in == channels else nn.Conv2d(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class KVLayer(nn.Module):
    """Pre-norm Transformer layer that also returns its keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.l1, self.l2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.n1(x)
        k, v, q = self.k(y + pos), self.v(y), self.q(y + pos)
        b, n, d = x.shape
        q, kk, vv = (t.view(b, n, self.heads, d // self.heads).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, kk, vv).transpose(1, 2).reshape(b, n, d)
        x = x + self.o(attended)
        return x + self.l2(F.relu(self.l1(self.n2(x)))), k, v


class KVEncoder(nn.Module):
    """ResNet stem and four layers; gives (K1, V1, ..., K4, V4)."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(inplace=True), BasicBlock(8, 8), BasicBlock(8, dim, 2)
        )
        self.register_buffer("pos", torch.randn(1, 16, dim), persistent=False)
        self.layers = nn.ModuleList([KVLayer(dim, 2) for _ in range(4)])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(images).flatten(2).transpose(1, 2)
        out: list[Tensor] = []
        for layer in self.layers:
            x, k, v = layer(x, self.pos)
            out += [k, v]
        return tuple(out)


class ACTEncoder(nn.Module):
    """In the manner of ACT: tokens (sequence, batch, dim), latent and state tokens before the image's."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, dim, 3, 4), nn.BatchNorm2d(dim), nn.ReLU(inplace=True))
        self.latent, self.state = nn.Linear(4, dim), nn.Linear(6, dim)
        self.token_pos = nn.Embedding(2, dim)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(dim, 2, 16) for _ in range(3)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor, latent: Tensor, state: Tensor) -> Tensor:
        tokens = torch.stack([self.latent(latent), self.state(state)]) + self.token_pos.weight.unsqueeze(1)
        features = self.backbone(image).flatten(2).permute(2, 0, 1)
        x = torch.cat([tokens, features])
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 8, 3, 2, 1), nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        return a + self.up(b + self.middle(b))


class Batch(nn.Module):
    """Dicts in and out, an auxiliary output, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.aux, self.state, self.join = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = self.image(batch["image"])
        aux = self.aux(x)
        x = torch.relu(x)
        if "state" in batch:
            x = x + self.state(batch["state"])
        return {"out": [self.join(x)], "aux": aux, "note": batch["note"], "none": None, "size": x.shape[0]}


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, **more: Tensor) -> Result:
        y = self.first(x)
        if mask is not None:
            y = y * mask
        return Result(self.second(y) * scale, more["bias"] if more else None)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.out(x) @ self.embed.weight


class Branching(nn.Module):
    """Python that looks at sizes, next to the cut: torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("pos", torch.randn(1, 5, 4))

    def forward(self, x: Tensor) -> Pair:
        x = self.first(x) + self.pos
        if x.shape[1] > 3:
            x = x * 2
        b, n, d = x.size()
        return Pair(self.second(x.reshape(b * n, d)).view(b, n, d), x.shape[0])


class SingleSample(Branching):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.shape[0] > 1:
            x = x * 2
        return self.second(x)


class Opaque(nn.Module):
    """Code that cannot be traced, in a submodule that does not hold the cut."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) if float(x.sum()) > 0 and len(x) > 1 else x - self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Inner(), self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).reshape(len(x), -1)


def tensors(*shapes: tuple[int, ...]) -> Callable[[int], tuple[Tensor, ...]]:
    """Inputs for a batch size: 0 in a shape stands for it."""
    return lambda batch: tuple(torch.randn(*[size or batch for size in shape]) for shape in shapes)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, **options), 3, enable_nested_tensor=False)


CASES: list[tuple[str, Callable[[], nn.Module], str, Callable[[int], tuple[Any, ...]]]] = [
    ("kv", KVEncoder, "stem", tensors((0, 3, 16, 16))),
    ("kv", KVEncoder, "stem.2", tensors((0, 3, 16, 16))),
    ("kv", KVEncoder, "layers.0", tensors((0, 3, 16, 16))),
    ("kv", KVEncoder, "layers.2", tensors((0, 3, 16, 16))),
    ("kv", KVEncoder, "layers.3", tensors((0, 3, 16, 16))),
    ("act", ACTEncoder, "layers.1", tensors((0, 3, 16, 16), (0, 4), (0, 6))),
    ("act", ACTEncoder, "backbone", tensors((0, 3, 16, 16), (0, 4), (0, 6))),
    ("torch", lambda: encoder(batch_first=True), "layers.1", tensors((0, 5, 8))),
    ("torch_seq_first", encoder, "layers.1", tensors((5, 0, 8))),
    ("unet", UNet, "down2", tensors((0, 3, 8, 8))),
    ("dict", Batch, "image", lambda b: ({"image": torch.randn(b, 4), "state": torch.randn(b, 4), "note": "x"},)),
    ("shared", Shared, "block", tensors((0, 4))),
    ("branching", Branching, "first", tensors((0, 5, 4))),
    ("opaque", Opaque, "first", tensors((0, 4))),
]


@pytest.fixture(autouse=True)
def _unfused() -> Any:
    """Bit-equality is promised where torch's fused inference path does not run."""
    torch.manual_seed(0)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, tuple | list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif dataclasses.is_dataclass(a):
        assert_same(vars(a), vars(b))
    else:
        assert a == b


@pytest.mark.parametrize(("make", "cut", "inputs"), [c[1:] for c in CASES], ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_halves_are_the_whole(
    make: Callable[[], nn.Module], cut: str, inputs: Callable[[int], tuple[Any, ...]]
) -> None:
    module = make().eval()
    head, tail = split_module(module, cut, inputs(2))
    with torch.no_grad():
        for batch in (2, 1, 3, 8):
            x = inputs(batch)
            between = head(*x)
            assert type(between) is tuple
            assert all(isinstance(tensor, Tensor) for tensor in between)
            assert_same(tail(*between), module(*x))

        again, original = inputs(3), module.state_dict()
        for copied in (copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))):
            assert_same(copied(tail)(*copied(head)(*again)), module(*again))
            assert copied(head).state_dict().keys() == head.state_dict().keys()
    for part in (head, tail):
        assert all(torch.equal(value, original[name]) for name, value in part.state_dict().items())
        assert not part.train().training
        assert not any(m.training for m in part.modules())
    assert inspect.signature(head.forward).parameters == inspect.signature(module.forward).parameters


def test_keys_and_values_that_are_finished_are_handed_on() -> None:
    module = KVEncoder().eval()
    head, tail = split_module(module, "layers.1", (torch.randn(2, 3, 16, 16),))
    between = head(torch.randn(2, 3, 16, 16))
    assert len(between) == 5  # K1, V1, the tokens, K2, V2; the positional embedding is a constant on both sides
    names = {name.split(".")[1] for name in tail.state_dict() if name.startswith("layers")}
    assert names == {"2", "3"}
    assert not any(name.startswith(("layers.2", "layers.3")) for name in head.state_dict())
    assert "pos" in dict(tail.named_buffers())
    assert tail(*between)[0] is between[head.crossing.names.index("layers_0_1")]


def test_inputs_for_the_tail_are_the_very_objects_and_come_last() -> None:
    module = ACTEncoder().eval()
    inputs = tensors((0, 3, 16, 16), (0, 4), (0, 6))(2)
    head, tail = split_module(module, "backbone", inputs)
    assert head.passthrough == tail.passthrough == {1: "latent", 2: "state"}
    between = head(*inputs)
    assert between[1] is inputs[1]
    assert between[2] is inputs[2]
    assert not any(name.startswith(("latent", "state")) for name in head.state_dict())


def test_keyword_arguments_defaults_and_dataclasses() -> None:
    module = Keywords().eval()
    x, mask, bias = torch.randn(2, 4), torch.rand(2, 4), torch.randn(4)
    head, tail = split_module(module, "first", (x,), example_kwargs={"mask": mask, "scale": 3.0, "bias": bias})
    with torch.no_grad():
        assert_same(tail(*head(bias=bias, x=x, scale=3.0, mask=mask)), module(x, mask, scale=3.0, bias=bias))
        with pytest.raises(InputError, match=r"called in another way[\s\S]*'scale': 1.0"):
            head(x, mask, bias=bias)
        head, tail = split_module(module, "first", (x,))
        assert_same(tail(*head(x)), module(x))
        assert_same(tail(*head(x, None)), module(x))


def test_results_that_are_dataclasses_cross_as_tensors_and_once() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Result:
            x = self.linear(x)
            return Result(x, x.mean(0))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Layer(), Layer()

        def forward(self, x: Tensor) -> tuple[Result, list[Tensor]]:
            first = self.a(x)
            second = self.b(first.tokens + first.pooled)
            return Result(second.tokens * first.tokens, second.pooled), [first.tokens, x]

    module, x = Model().eval(), torch.randn(2, 4)
    head, tail = split_module(module, "a", (x,))
    assert head.crossing.names == ("a_tokens", "a_pooled", "x")
    assert head.passthrough == {2: "x"}
    with torch.no_grad():
        assert_same(tail(*head(x)), module(x))


def test_asserts_on_sizes_are_no_obstacle() -> None:
    scope: dict[str, Any] = {}  # pytest rewrites the asserts of this file
    code = "def forward(self, x):\n    assert x.shape[0] == len(x), 'batch'\n    return self.second(self.first(x))"
    exec(code, scope)
    module = type("Asserting", (Opaque,), {"forward": scope["forward"]})().eval()
    head, tail = split_module(module, "first", (torch.randn(2, 4),))
    assert "torch.ops" not in tail.code
    assert "len" not in scope
    x = torch.randn(1, 4)
    assert_same(tail(*head(x)), module(x))


def test_torch_export_is_used_where_fx_cannot_trace() -> None:
    head, tail = split_module(Branching(), "first", (torch.randn(1, 5, 4),))
    assert "torch.ops.aten" in tail.code
    assert set(tail.state_dict()) == {"pos", "second.weight", "second.bias"}
    assert set(head.state_dict()) == {"first.weight", "first.bias"}
    with pytest.raises(InputError, match=r"Input 'x' has a shape for which the split does not hold"):
        head(torch.randn(2, 4, 4))


def test_a_branch_for_single_samples_is_refused_rather_than_wrong() -> None:
    module = SingleSample().eval()
    head, tail = split_module(module, "first", (torch.randn(2, 4),))
    x = torch.randn(3, 4)
    assert torch.equal(tail(*head(x)), module(x))
    with pytest.raises(InputError, match=r"Expected: sizes \[2\.\., 4\]\s+Got: sizes \[1, 4\]"):
        head(torch.randn(1, 4))


def test_fused_inference_path_agrees_to_rounding() -> None:
    module = encoder(batch_first=True).eval()
    head, tail = split_module(module, "layers.1", (torch.randn(2, 5, 8),))
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.no_grad():
        x = torch.randn(3, 5, 8)
        torch.testing.assert_close(tail(*head(x)), module(x), atol=1e-6, rtol=0)


def test_the_module_is_left_as_it_was() -> None:
    module = KVEncoder().train()
    module.stem.eval()
    module.layers[0].requires_grad_(False)
    keys = [sorted(vars(m)) for m in module.modules()]
    flags = [m.training for m in module.modules()]
    grads = [p.requires_grad for p in module.parameters()]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    rng = torch.get_rng_state()
    head, tail = split_module(module, "layers.1", (torch.zeros(2, 3, 16, 16),))
    assert torch.equal(rng, torch.get_rng_state())
    assert keys == [sorted(vars(m)) for m in module.modules()]
    assert flags == [m.training for m in module.modules()]
    head.requires_grad_(False)
    tail.requires_grad_(False)
    assert grads == [p.requires_grad for p in module.parameters()]
    head.get_buffer("stem.3.bn1.running_mean").add_(1)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    name = "layers.0.q.weight"
    assert head.get_parameter(name).data_ptr() == module.get_parameter(name).data_ptr()


def test_the_tail_does_not_edit_what_the_head_gave() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1)).eval()
    head, tail = split_module(module, "0", (torch.randn(2, 3, 8, 8),))
    x = torch.randn(2, 3, 8, 8)
    between = head(x)
    kept = between[0].clone()
    assert torch.equal(tail(*between), module(x))
    assert torch.equal(between[0], kept)


def test_edits_in_place_that_others_see() -> None:
    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a = self.first(x)
            view = a[:, :2]
            a.mul_(2)
            return self.second(a), view

    module = Edits().eval()
    head, tail = split_module(module, "first", (torch.randn(2, 4),))
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert_same(tail(*head(x)), module(x))


def test_tail_compiles_into_one_graph() -> None:
    module = Batch().eval()
    example = {"image": torch.randn(2, 4), "state": torch.randn(2, 4), "note": "x"}
    head, tail = split_module(module, "image", (example,))
    between = head(example)
    compiled = torch.compile(tail, fullgraph=True, backend="eager")
    assert_same(compiled(*between), tail(*between))


def test_a_head_exports_with_its_own_input_names() -> None:
    module = KVEncoder().eval()
    x = torch.randn(2, 3, 16, 16)
    head, _ = split_module(module, "layers.0", (x,))
    program = torch.export.export(head, (x,), strict=False)
    assert program.graph_signature.user_inputs == ("images",)
    assert_same(tuple(program.module()(x)), head(x))


@pytest.mark.parametrize(
    ("cut", "before", "after"),
    [
        ("layers.1.o", "layers.0", "layers.1"),
        ("layers.1.k", "layers.0", "layers.1"),
        ("layers.0.l1", "stem", "layers.0"),
        ("stem.3.conv1", "stem.2", "stem.3"),
        ("stem.2.bn2", "stem.1", "stem.2"),
    ],
)
def test_a_cut_inside_a_residual_branch(cut: str, before: str, after: str) -> None:
    module = KVEncoder().eval()
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(CompileError, match="lies inside a residual branch") as caught:
        split_module(module, cut, (x,))
    assert f"the nearest are '{before}' (before) and '{after}' (after)" in str(caught.value)
    assert "tensors would have to cross: torch.float32 [2, " in str(caught.value)
    assert "allow_residual=True" in str(caught.value)

    head, tail = split_module(module, cut, (x,), allow_residual=True)
    with torch.no_grad():
        assert_same(tail(*head(x)), module(x))
    for name in (before, after):
        split_module(module, name, (x,))


def test_what_is_no_residual() -> None:
    class Adds(nn.Module):
        """Adds a positional embedding, computed from an input, before each layer."""

        def __init__(self) -> None:
            super().__init__()
            self.pos, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, where: Tensor) -> Tensor:
            pos = self.pos(where)
            return self.b(self.a(x + pos) + pos)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Adds()

        def forward(self, x: Tensor, where: Tensor) -> Tensor:
            return self.inner(x, where)

    module, x = Outer().eval(), (torch.randn(2, 5, 4), torch.randn(1, 5, 4))
    head, tail = split_module(module, "inner.a", x)
    with torch.no_grad():
        assert_same(tail(*head(*x)), module(*x))


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if float(y.sum()) > 0 else y


@pytest.mark.parametrize(
    ("cut", "kind", "message"),
    [
        ("frist", CompileError, r"has no submodule 'frist'[\s\S]*nearest are \['first'"),
        ("", CompileError, r"names the module itself[\s\S]*'first', 'second'"),
        ("spare", CompileError, r"'spare' exists but is never called when Untraceable runs"),
        ("first", CompileError, r"neither torch.fx nor torch.export[\s\S]*torch.fx: [\s\S]*torch.export: [\s\S]*move"),
    ],
)
def test_messages(cut: str, kind: type[Exception], message: str) -> None:
    module = Untraceable()
    with pytest.raises(kind, match=message):
        split_module(module, cut, (torch.randn(2, 4),))
    assert module.training


def test_messages_on_examples() -> None:
    module = KVEncoder()
    with pytest.raises(InputError, match=r"do not fit the module's forward[\s\S]*KVEncoder.forward\(images"):
        split_module(module, "stem", (torch.randn(1), 2, 3))
    with pytest.raises(InputError, match=r"KVEncoder does not run on the example inputs: RuntimeError"):
        split_module(module, "stem", (torch.randn(2, 4, 16, 16),))
    with pytest.raises(InputError, match=r"example_inputs has the wrong type[\s\S]*Got: Tensor"):
        split_module(module, "stem", torch.randn(2, 3, 16, 16))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"hold no tensor"):
        split_module(Keywords(), "first", (1,))


def test_a_cut_that_nothing_depends_on() -> None:
    class Wasted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.a(x)
            return self.b(x)

    with pytest.raises(CompileError, match=r"head would have no outputs"):
        split_module(Wasted(), "a", (torch.randn(2, 4),))


class Dag(nn.Module):
    """A random graph of layers: layer i takes the sum of some earlier results; several results are outputs."""

    def __init__(
        self, sources: list[list[int]], outputs: list[int], repeats: list[int], *, looks_at_sizes: bool
    ) -> None:
        super().__init__()
        self.sources, self.outputs, self.repeats, self.looks_at_sizes = sources, outputs, repeats, looks_at_sizes
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in sources])
        self.scale = nn.Parameter(torch.rand(3))

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        if self.looks_at_sizes and a.shape[1] != 3:
            raise ValueError("three features")
        results = [a, b]
        for layer, sources, repeat in zip(self.layers, self.sources, self.repeats, strict=True):
            x = sum(results[source] for source in sources) * self.scale
            for _ in range(repeat):
                x = F.relu(layer(x), inplace=True)
            results.append(x)
        return [results[2 + index] for index in self.outputs]


@st.composite
def dags(draw: st.DrawFn) -> tuple[Dag, int]:
    count = draw(st.integers(2, 6))
    sources = [draw(st.lists(st.integers(0, i + 1), min_size=1, max_size=3, unique=True)) for i in range(count)]
    outputs = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3))
    repeats = [draw(st.integers(1, 2)) for _ in range(count)]
    looks_at_sizes = draw(st.sampled_from([False, False, False, True]))
    return Dag(sources, outputs, repeats, looks_at_sizes=looks_at_sizes), draw(st.integers(0, count - 1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(dags())
def test_random_graphs(case: tuple[Dag, int]) -> None:
    module, at = case
    module.eval()
    try:
        head, tail = split_module(module, f"layers.{at}", (torch.randn(2, 3), torch.randn(2, 3)))
    except CompileError as error:
        if "no outputs" not in str(error):
            raise
        return
    x = (torch.randn(3, 3), torch.randn(3, 3))
    with torch.no_grad():
        assert_same(tail(*head(*x)), module(*x))
        outputs = head(*x)
    used = {i for i, _ in enumerate(module.layers) if f"layers.{i}.weight" in head.state_dict()}
    assert used <= set(range(at + 1))
    assert not any(f"layers.{i}.weight" in tail.state_dict() for i in used)
    assert all(f"layers.{i}.weight" not in head.state_dict() for i in range(at + 1, len(module.layers)))
    # nothing is dead: every parameter of the head reaches an output, every parameter of the tail a result
    with torch.enable_grad():
        for part, result in ((head, head(*x)), (tail, tail(*[o.detach() for o in outputs]))):
            parameters = dict(part.named_parameters())
            if parameters:
                total = sum(tensor.sum() for tensor in result if tensor.requires_grad)
                grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
                assert all(grad is not None for grad in grads)


def test_modules_built_under_inference_mode_are_named():
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(CompileError, match=r"Sequential was built or loaded under torch.inference_mode"):
        split_module(module, "0", (torch.randn(2, 2),))


def test_what_torch_export_prints_is_not_shown(capfd):
    class Decides(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            y = self.linear(x)
            return y * 2 if y.sum() > 0 else y

    with pytest.raises(CompileError, match=r"neither torch\.fx nor torch\.export can follow"):
        split_module(Decides(), "linear", (torch.randn(2, 2),))
    assert capfd.readouterr().err == ""
