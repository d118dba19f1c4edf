"""Principal components: against a plane that the data lie in, and a projection written out."""

from __future__ import annotations

import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor

from ebmguard.errors import ConfigError
from ebmguard.reference_training.shortrun.figures.principal import (
    components_needed,
    principal_errors,
)


def data(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 17, (count, 1, 3, 3), generator=generator, dtype=torch.uint8)


def test_errors_are_those_of_sklearn() -> None:
    train, x = data(50), data(7, seed=1).double() / 8 - 1
    found = principal_errors(x, train, levels=16)
    assert found.shape == (10, 7)
    rows = (train.flatten(1).double() / 8 - 1).numpy()
    # Without components there is the mean image, of which sklearn has no model.
    mean = torch.from_numpy(rows).mean(0)
    torch.testing.assert_close(found[0], (mean - x.flatten(1)).square().mean(1))
    for k in range(1, 10):
        model = PCA(k).fit(rows)
        told = torch.from_numpy(model.inverse_transform(model.transform(x.flatten(1).numpy())))
        expected = (told - x.flatten(1)).square().mean(1)
        torch.testing.assert_close(found[k], expected, rtol=1e-9, atol=1e-12)


def test_few_images_have_few_components() -> None:
    found = principal_errors(data(5, seed=1).double() / 8 - 1, data(4), levels=16)
    assert found.shape == (5, 5)
    assert bool((found[-1] > 0.01).all())
    assert components_needed(found, 1e-6) is None


def test_the_fewest_components_that_suffice() -> None:
    errors = torch.tensor([[4.0, 2.0], [1.0, 3.0], [0.5, 0.5]])
    assert [components_needed(errors, least) for least in (9, 3, 2.9, 2, 1, 0.5)] == [
        0, 0, 1, 1, 2, 2
    ]  # fmt: skip
    assert components_needed(errors, 0.4) is None


@pytest.mark.parametrize("images", [data(0), data(3)[..., :2]])
def test_data_of_another_kind_are_refused(images: Tensor) -> None:
    with pytest.raises(ConfigError, match="have no components in data of"):
        principal_errors(torch.zeros(2, 1, 3, 3), images, levels=16)
