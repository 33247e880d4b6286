from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from federated import batch, convolutional, make_client, mlp, rng
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakfrontier.adversaries import FedAvg
from leakfrontier.defenses import DPSGD, Batch, Plan, Update, batch_gradient

MODELS = [mlp, convolutional]
WAYS = ["ghost", "hooks"]


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no model have been looked at by another test."""
    monkeypatch.setattr("leakfrontier.defenses.dpsgd._LOOKS", {})


def flat(update: Update) -> Tensor:
    return torch.cat([value.detach().flatten() for value in update.values()])


def clipped_mean(model: nn.Module, data: Batch, norm: float) -> Tensor:
    """Return the mean of clipped gradients, one example at a time."""
    total = torch.zeros(())
    for inputs, target in zip(*data, strict=True):
        one = flat(batch_gradient(model, cross_entropy, Batch(inputs[None], target[None])))
        total = total + one * min(1.0, norm / (float(one.norm()) + 1e-6))
    return total / len(data.inputs)


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_without_noise_it_is_the_mean_of_clipped_gradients(build, way) -> None:  # noqa: ANN001
    model, data = build(), batch(6)
    gradient = flat(DPSGD(0.0, 0.5, per_example=way).gradient(model, cross_entropy, data, rng()))
    torch.testing.assert_close(gradient, clipped_mean(model, data, 0.5), rtol=1e-4, atol=1e-6)


def test_ghost_and_hooks_draw_the_same_noise() -> None:
    model, data = mlp(), batch(6)
    ghost, hooks = (
        flat(DPSGD(1.0, 0.5, per_example=way).gradient(model, cross_entropy, data, rng(4)))  # type: ignore[arg-type]
        for way in WAYS
    )
    torch.testing.assert_close(ghost, hooks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("hidden", "clipping", "ghost"),
    [(8, "flat", False), (2**17, "flat", True), (2**17, "per_layer", False)],
)
def test_ghost_clipping_is_for_gradients_that_are_large(hidden, clipping, ghost) -> None:  # noqa: ANN001
    defense = DPSGD(0.0, 1.0, clipping=clipping)
    defense.gradient(mlp(hidden=hidden), cross_entropy, batch(2), rng())
    assert defense._client is not None
    assert defense._client.ghost is ghost


def test_per_layer_clipping_bounds_every_parameter() -> None:
    model, data = mlp(), batch(1)
    defense = DPSGD(0.0, 0.2, clipping="per_layer")
    gradient = defense.gradient(model, cross_entropy, data, rng())
    norms = torch.stack([value.norm() for value in gradient.values()])
    torch.testing.assert_close(norms, torch.full((4,), 0.1), rtol=1e-3, atol=1e-4)
    replayed = defense.replay({}).gradient(model, cross_entropy, data, rng())
    torch.testing.assert_close(flat(replayed), flat(gradient), rtol=1e-4, atol=1e-6)


def test_batches_are_poisson_samples_divided_by_the_expected_size() -> None:
    defense = DPSGD(0.0, 1.0)
    sizes = [len(rows) for rows in defense.batches(200, 20, 200, rng())]
    assert len(sizes) == 2000
    assert sum(sizes) / 2000 == pytest.approx(20, abs=4 * math.sqrt(18 / 2000))
    assert torch.tensor(sizes).float().var() == pytest.approx(200 * 0.1 * 0.9, rel=0.15)
    model, data = mlp(), batch(5)
    gradient = flat(defense.gradient(model, cross_entropy, data, rng()))
    torch.testing.assert_close(gradient * 20 / 5, clipped_mean(model, data, 1.0))


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_sample_is_noise_alone(way) -> None:  # noqa: ANN001
    defense, model = DPSGD(1.0, 2.0, per_example=way), mlp(hidden=300)
    next(defense.batches(100, 10, 1, rng()))
    nobody = Batch(batch(1).inputs[:0], batch(1).targets[:0])
    gradient = flat(defense.gradient(model, cross_entropy, nobody, rng()))
    assert float(gradient.std()) == pytest.approx(2.0 / 10, rel=0.02)


def test_without_poisson_sampling_every_example_is_seen_and_nothing_is_amplified() -> None:
    defense = DPSGD(1.0, poisson_sampling=False)
    rows = torch.cat(list(defense.batches(10, 3, 1, rng())))
    assert sorted(rows.tolist()) == list(range(10))
    everybody = Plan(10, 1.0, 1e-5)
    assert defense.guarantee(everybody) == DPSGD(1.0).guarantee(everybody)
    assert defense.guarantee(Plan(10, 0.01, 1e-5)) == DPSGD(1.0).guarantee(everybody)
    # Of shuffled epochs, an example is in one batch each.
    epochs = Plan(10, 0.3, 1e-5, passes=3)
    assert defense.guarantee(epochs) == DPSGD(1.0).guarantee(Plan(3, 1.0, 1e-5))


def test_batch_norm_is_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"layer '0' is a BatchNorm.*Use GroupNorm"):
        DPSGD(1.0).on_model(nn.Sequential(nn.BatchNorm2d(3)))


@pytest.mark.parametrize("build", MODELS)
def test_identity_setting_is_the_undefended_gradient(build) -> None:  # noqa: ANN001
    model, data = build(), batch(6)
    gradient = DPSGD(0.0, math.inf).gradient(model, cross_entropy, data, rng())
    plain = batch_gradient(model, cross_entropy, data)
    assert list(gradient) == list(plain)
    torch.testing.assert_close(flat(gradient), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("sigma", "norm", "size"), [(1.0, 1.0, 4), (0.3, 2.0, 1), (2.0, 0.1, 8)])
def test_noise_has_standard_deviation_sigma_c_over_b(sigma: float, norm: float, size: int) -> None:
    model, data = mlp(hidden=300), batch(size)  # 60,000 parameters: 0.3 % standard error
    defense = DPSGD(sigma, norm)
    residual = flat(defense.gradient(model, cross_entropy, data, rng(3))) - clipped_mean(
        model, data, norm
    )
    assert float(residual.std()) == pytest.approx(sigma * norm / size, rel=0.01)
    assert abs(float(residual.mean())) < 4 * sigma * norm / size / math.sqrt(residual.numel())


def test_no_example_contributes_more_than_the_norm() -> None:
    model, data = mlp(), batch(5)
    extreme = Batch(
        torch.cat([data.inputs, 1e4 * data.inputs[:1]]), data.targets[[0, 1, 2, 3, 4, 0]]
    )
    for norm in (0.01, 1.0):
        with_it = flat(DPSGD(0.0, norm).gradient(model, cross_entropy, extreme, rng())) * 6
        without = flat(DPSGD(0.0, norm).gradient(model, cross_entropy, data, rng())) * 5
        assert float((with_it - without).norm()) <= norm * (1 + 1e-3)


def test_same_optimizer_for_every_step_and_a_fresh_one_for_a_fresh_copy() -> None:
    model, defense = mlp(), DPSGD(1.0)
    first = defense.gradient(model, cross_entropy, batch(4), rng(1))
    optimizer = defense._client.optimizer  # type: ignore[union-attr]
    second = defense.gradient(model, cross_entropy, batch(4), rng(2))
    assert defense._client.optimizer is optimizer  # type: ignore[union-attr]
    assert type(optimizer).__module__.startswith("opacus.")
    assert not torch.equal(flat(first), flat(second))
    assert replace(defense)._client is None


def test_follows_the_model_as_it_is_trained() -> None:
    model, defense = mlp(), DPSGD(0.0, 1.0)
    defense.gradient(model, cross_entropy, batch(4), rng())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    gradient = flat(defense.gradient(model, cross_entropy, batch(4), rng()))
    torch.testing.assert_close(gradient, clipped_mean(model, batch(4), 1.0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("build", MODELS)
def test_replay_is_the_clipping_alone_and_differentiable(build) -> None:  # noqa: ANN001
    model, data = build(), batch(3)
    replay = DPSGD(1.0, 0.5).replay({})
    inputs = data.inputs.clone().requires_grad_()
    gradient = replay.gradient(model, cross_entropy, Batch(inputs, data.targets), rng())
    torch.testing.assert_close(flat(gradient), clipped_mean(model, data, 0.5), rtol=1e-4, atol=1e-6)
    (slope,) = torch.autograd.grad(sum(v.sum() for v in gradient.values()), inputs)
    assert slope.abs().sum() > 0


def test_log_likelihood_is_the_normal_density_up_to_a_constant() -> None:
    defense = DPSGD(0.5, 2.0)
    expected = {"w": torch.zeros(5)}
    observed = [{"w": torch.randn(5, generator=rng(i))} for i in range(2)]
    normal = torch.distributions.Normal(0.0, 0.5 * 2.0 / 4)
    ours = [defense.log_likelihood(one, expected, batch_size=4) for one in observed]
    theirs = [normal.log_prob(one["w"]).sum() for one in observed]
    torch.testing.assert_close(ours[0] - ours[1], theirs[0] - theirs[1])  # type: ignore[operator]
    assert defense.log_likelihood(observed[0], expected) is None  # several local steps


REFERENCES = [  # sample rate, sigma, steps, delta; epsilon by PLD
    (256 / 60000, 1.1, 14040, 1e-5, 2.380),
    (256 / 60000, 1.3, 3510, 1e-5, 0.864),
    (0.01, 1.0, 1000, 1e-5, 1.828),
    (0.01, 0.6, 1000, 1e-5, 7.434),
    (1.0, 5.0, 100, 1e-5, 9.997),
    (1.0, 40.0, 100, 1e-5, 0.926),
    (0.02, 0.8, 500, 1e-3, 3.003),
]


@pytest.mark.parametrize(("sample_rate", "sigma", "steps", "delta", "pld"), REFERENCES)
def test_accounting_equals_the_references(
    sample_rate: float, sigma: float, steps: int, delta: float, pld: float
) -> None:
    plan = Plan(steps, sample_rate, delta)
    guarantee = DPSGD(sigma).guarantee(plan)
    assert guarantee.epsilon == pytest.approx(pld, rel=0.005)
    assert (guarantee.unit, guarantee.adjacency) == ("record", "zero-out")


def test_no_noise_gives_no_guarantee() -> None:
    assert DPSGD(0.0).guarantee(Plan(1, 1.0, 1e-5)).epsilon == math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_multiplier": -1}, r"noise_multiplier must be in \[0, inf\)"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": 1, "max_grad_norm": 0}, r"max_grad_norm must be in \(0, inf\]"),
        ({"noise_multiplier": 1, "max_grad_norm": math.nan}, "max_grad_norm"),
        ({"noise_multiplier": 1, "max_grad_norm": math.inf}, "finite with noise"),
        ({"noise_multiplier": 1, "clipping": "soft"}, "clipping must be 'flat' or 'per_layer'"),
        ({"noise_multiplier": 1, "per_example": "magic"}, "'auto', 'ghost' or 'hooks'"),
        (
            {"noise_multiplier": 1, "clipping": "per_layer", "per_example": "ghost"},
            "must be 'hooks' with clipping=",
        ),
    ],
)
def test_rejects_bad_parameters(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DPSGD(**options)  # type: ignore[arg-type]


class Awkward(nn.Module):
    """A model that Opacus cannot take gradients of, for one reason after the other."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self.reason = reason
        self.first, self.second = nn.Linear(192, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 10)
        if reason == "unused":
            self.unused = nn.Linear(3, 3)
        if reason == "discarded":
            self.unused = nn.Linear(192, 3)
        if reason == "tied":
            self.tied = nn.Linear(6, 6)
            self.tied.weight = self.second.weight
        if reason == "own parameter":
            self.scale = nn.Parameter(torch.full((6,), 1.5))
        if reason == "integer":
            self.steps = nn.Parameter(torch.zeros(3, dtype=torch.long), requires_grad=False)
        self.dropout = nn.Dropout(0.0 if reason != "dropout" else 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.first(inputs.view(len(inputs), -1))  # no examples cannot be viewed
        if self.reason == "discarded":
            self.unused(inputs.flatten(1))
        if self.reason == "tied":
            values = self.tied(values).tanh()
        if self.reason == "own parameter":
            values = self.scale * values
        if self.reason != "in place":
            values = self.dropout(self.second(values).tanh())
        if self.reason == "twice":
            values = self.second(values)
        if self.reason == "in place":  # as torchvision's ResNets add
            values = self.second(values)
            values += 1
        if self.reason == "first axis":
            pieces: Tensor = self.second(values.repeat(3, 1))
            values = pieces.view(3, len(inputs), 6).sum(0)
        outputs: Tensor = self.last(values)
        return outputs


REASONS = [
    *("unused", "discarded", "tied", "own parameter", "integer", "twice", "first axis"),
    *("view of none", "in place"),
]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("way", WAYS)
def test_models_that_opacus_cannot_handle(reason, way) -> None:  # noqa: ANN001
    torch.manual_seed(0)
    model, data = Awkward(reason), batch(6)
    client = make_client(model, DPSGD(0.0, 0.5, per_example=way))
    found = client.upload(data, rng())  # where weights are placed into the model
    torch.testing.assert_close(flat(found), clipped_mean(model, data, 0.5), rtol=1e-4, atol=1e-6)
    assert "steps" not in found

    noisy = DPSGD(1.0, 2.0, per_example=way)
    next(noisy.batches(100, 10, 1, rng()))
    clean = flat(noisy.replay({}).gradient(model, cross_entropy, data, rng()))
    for examples in (data, data.at(slice(0))):
        upload = flat(noisy.gradient(model, cross_entropy, examples, rng()))
        noise = upload - clean * len(examples.inputs) / 10
        assert float(noise.std()) == pytest.approx(2.0 / 10, rel=0.15)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_in_the_model(way) -> None:  # noqa: ANN001
    model, data = Awkward("dropout"), batch(6)
    defense = DPSGD(0.0, 0.5, per_example=way)
    first, second = (flat(defense.gradient(model, cross_entropy, data, rng())) for _ in range(2))
    assert not torch.equal(first, second)
    replayed = flat(defense.replay({}).gradient(model, cross_entropy, data, rng()))
    assert float(replayed.norm()) <= 0.5 + 1e-4
    still = [
        flat(replace(defense).gradient(model.eval(), cross_entropy, data, rng())) for _ in range(2)
    ]
    assert torch.equal(*still)


@pytest.mark.parametrize("way", WAYS)
def test_frozen_parameters_are_neither_uploaded_nor_clipped(way) -> None:  # noqa: ANN001
    model, data = mlp(), batch(6)
    whole = DPSGD(0.0, math.inf, per_example=way).gradient(model, cross_entropy, data, rng())
    frozen = next(iter(whole))
    model.get_parameter(frozen).requires_grad_(False)
    for norm, noise in ((0.5, 0.0), (math.inf, 0.0), (1.0, 1.0)):
        defense = DPSGD(noise, norm, per_example=way)
        assert frozen not in defense.gradient(model, cross_entropy, data, rng())
        assert frozen not in defense.replay({}).gradient(model, cross_entropy, data, rng())
    one = data.at(slice(1))
    clipped = DPSGD(0.0, 1e-3, per_example=way).gradient(model, cross_entropy, one, rng())
    assert float(flat(clipped).norm()) == pytest.approx(1e-3, rel=1e-2)  # of what is trained


def separation(first: list[float], second: list[float]) -> float:
    """Return how often the one list's values are above the other's: 1/2 if they are alike."""
    above = torch.tensor(first)[:, None] > torch.tensor(second)[None]
    return abs(float(above.float().mean()) - 0.5)


def test_the_norm_of_a_gradient_does_not_tell_how_many_examples_there_are() -> None:
    """Fifteen examples or fourteen, where 32 are configured: once told apart by one upload."""
    norms: dict[int, list[float]] = {14: [], 15: []}
    for size, found in norms.items():
        data = batch(15).at(slice(size))
        for seed in range(60):
            defense, draws = DPSGD(4.0, per_example="hooks"), rng(seed + 100 * size)
            drawn = data.at(next(defense.batches(size, 32, 1, draws)))
            gradient = defense.gradient(mlp(8), cross_entropy, drawn, draws)
            found.append(float(flat(gradient).norm()))
    assert separation(norms[14], norms[15]) < 0.2  # three standard errors
    assert torch.tensor(norms[15]).mean() == pytest.approx(4 / 32 * math.sqrt(1634), rel=0.02)


def test_the_norm_of_a_change_does_not_tell_how_many_steps_would_see_all_examples() -> None:
    """33 examples or 32, in batches of 32: two steps of an epoch, or one."""
    norms: dict[tuple[int, int | None], list[float]] = {}
    for steps in (2, None):
        protocol = FedAvg(batch_size=32, lr=0.1, steps=steps)
        for size in (32, 33):
            client = make_client(mlp(8), DPSGD(4.0, per_example="hooks"), protocol)
            norms[size, steps] = [
                float(flat(client.upload(batch(size), rng(seed))).norm()) for seed in range(40)
            ]
    assert separation(norms[32, 2], norms[33, 2]) < 0.25
    assert separation(norms[32, None], norms[33, None]) == 0.5  # epochs do, hence n is public


def test_models_and_losses_that_mix_examples_are_refused() -> None:
    weights = torch.arange(10.0) + 1  # normalised over the batch

    def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, weight=weights)

    with pytest.raises(ValueError, match="the loss mixes the examples of a batch"):
        DPSGD(1.0).gradient(mlp(), weighted, batch(6), rng())
    mixing = nn.Sequential(nn.Flatten(), nn.Softmax(dim=0), nn.Linear(192, 10))
    with pytest.raises(ValueError, match="the model mixes the examples of a batch"):
        DPSGD(1.0).gradient(mixing, cross_entropy, batch(6), rng())


class Hidden(nn.Module):
    """A layer that Opacus takes for harmless, and that mixes examples under a condition."""

    def __init__(self, condition: Callable[[Hidden, Tensor], bool]) -> None:
        super().__init__()
        self.condition, self.calls = condition, 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        return values - values.mean(dim=0) if self.condition(self, values) else values


def hiding(condition: Callable[[Hidden, Tensor], bool], *more: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 8), *more, Hidden(condition), nn.Linear(8, 10)
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_model_that_mixes_at_some_sizes_is_refused_when_it_does(way: str, dropout: float) -> None:
    model = hiding(lambda _, values: len(values) == 5, nn.Dropout(dropout))
    defense = DPSGD(1.0, per_example=way)  # type: ignore[arg-type]
    for size in (1, 2, 3, 4, 6, 7):
        defense.gradient(model, cross_entropy, batch(size), rng())
    with pytest.raises(ValueError, match="the model mixes the examples of a batch"):
        defense.gradient(model, cross_entropy, batch(5), rng())


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_mixes_from_some_call_on_is_refused_before_long(way: str) -> None:
    model = hiding(lambda layer, _: layer.calls > 30)
    defense = DPSGD(1.0, per_example=way)  # type: ignore[arg-type]
    for _ in range(31):
        defense.gradient(model, cross_entropy, batch(6), rng())
    with pytest.raises(ValueError, match="the model mixes the examples of a batch"):
        defense.gradient(model, cross_entropy, batch(6), rng())  # the 32nd


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_mixes_beside_examples_that_are_there_is_refused(way: str) -> None:
    model, data = hiding(lambda _, values: bool((values[:, 0] > 0).any())), batch(6)
    with torch.no_grad():
        model[1].weight[0] = 0
        model[1].weight[0, 0] = 1  # a positive first entry sets it off
        model[1].bias[0] = -1e-3
    data.inputs[:, 0, 0, 0] = -1.0
    data.inputs[4, 0, 0, 0] = 1.0
    with pytest.raises(ValueError, match="the model mixes the examples of a batch"):
        DPSGD(1.0, per_example=way).gradient(model, cross_entropy, data, rng())  # type: ignore[arg-type]


def test_a_model_is_looked_at_once_per_size_and_rarely_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(
        "leakfrontier.defenses.dpsgd.check_apart", lambda *given: looks.append(len(given[2].inputs))
    )
    model = mlp(4)
    for client in (DPSGD(1.0), DPSGD(1.0)):  # who share the model
        for _ in range(8):
            client.gradient(model, cross_entropy, batch(2), rng())
            client.gradient(model, cross_entropy, batch(3), rng())
    assert looks == [2, 3, 3, 3, 3, 3]  # the 1st, 2nd, 4th, 8th, 16th and 32nd


def test_looking_at_a_model_changes_no_draws() -> None:
    model, data = hiding(lambda *_: False, nn.Dropout(0.5)), batch(6)
    torch.manual_seed(3)
    first = DPSGD(1.0).gradient(model, cross_entropy, data, rng())
    torch.manual_seed(3)
    again = DPSGD(1.0).gradient(model, cross_entropy, data, rng())  # its second step
    DPSGD(1.0).gradient(model, cross_entropy, data, rng())
    torch.manual_seed(3)
    unseen = DPSGD(1.0).gradient(model, cross_entropy, data, rng())  # its fourth
    torch.manual_seed(3)
    unwatched = DPSGD(1.0).gradient(model, cross_entropy, data, rng())  # its fifth
    for other in (again, unseen, unwatched):
        assert torch.equal(flat(first), flat(other))


class Sequences(nn.Module):
    """A model of sequences: recurrent, or with attention along the right axis."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.last = kind, nn.Linear(8, 10)
        if kind == "gru":
            self.inner: nn.Module = nn.GRU(24, 8, batch_first=True)
        elif kind == "lstm":
            self.inner = nn.LSTM(24, 8, batch_first=True)
        else:
            self.embed = nn.Linear(24, 8)
            self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs.reshape(len(inputs), 8, 24)
        if self.kind == "attention":
            values = self.embed(values)
            values, _ = self.inner(values, values, values, need_weights=False)
        else:
            values, _ = self.inner(values)
        outputs: Tensor = self.last(values.mean(dim=1))
        return outputs


@pytest.mark.parametrize("kind", ["gru", "lstm", "attention"])
def test_recurrent_layers_and_attention_are_clipped_per_example(kind: str) -> None:
    torch.manual_seed(0)
    model, data = Sequences(kind), batch(4)
    defense = DPSGD(0.0, 0.1)
    found = flat(defense.gradient(model, cross_entropy, data, rng()))
    torch.testing.assert_close(found, clipped_mean(model, data, 0.1), rtol=1e-3, atol=1e-5)
    replayed = flat(defense.replay({}).gradient(model, cross_entropy, data, rng()))
    torch.testing.assert_close(replayed, found, rtol=1e-3, atol=1e-5)


def test_a_replay_of_local_steps_divides_by_the_configured_batch_size() -> None:
    """Three examples in steps of four: what is uploaded and what is replayed are the same."""
    data, protocol = batch(3), FedAvg(batch_size=4, lr=0.1)
    uploads = [
        make_client(mlp(), defense, protocol).upload(data, rng(), in_order=True)
        for defense in (DPSGD(0.0, 0.5), DPSGD(0.0, 0.5).replay({}))
    ]
    torch.testing.assert_close(flat(uploads[0]), flat(uploads[1]), rtol=1e-4, atol=1e-6)
    assert float(flat(uploads[0]).norm()) <= 0.1 * 0.5 * 3 / 4 + 1e-6


def test_a_model_that_keeps_a_function_that_refers_to_itself() -> None:
    model = mlp(4)

    def again(times: int) -> int:
        return again(times - 1) if times else 0

    model.again = again  # type: ignore[assignment]
    assert DPSGD(1.0).gradient(model, cross_entropy, batch(2), rng())
