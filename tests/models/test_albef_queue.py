import pytest
import torch

from models.albef.queues import NO_IMAGE, FeatureQueue


def test_starts_as_random_unit_vectors_of_no_image() -> None:
    queue = FeatureQueue(8, 5)
    for features in (queue.images, queue.texts):
        assert torch.allclose(features.norm(dim=0), torch.ones(5))
    assert not torch.allclose(queue.images, queue.texts)
    assert (queue.ids == NO_IMAGE).all()


@pytest.mark.parametrize(("size", "batch"), [(12, 4), (10, 4), (7, 3), (4, 4), (3, 5), (0, 3)])
def test_holds_the_newest_rows_whatever_the_batch(size: int, batch: int) -> None:
    queue = FeatureQueue(2, size)
    pushed = 0
    for _ in range(9):
        ids = torch.arange(pushed, pushed + batch)
        features = torch.stack([ids, -ids], dim=1).float()  # row i is (i, -i)
        queue.push(features, 2 * features, ids)
        pushed += batch
        newest = set(range(max(0, pushed - size), pushed))
        assert set(queue.ids.tolist()) - {NO_IMAGE} == newest
        filled = queue.ids != NO_IMAGE
        assert torch.equal(queue.images[0, filled], queue.ids[filled].float())
        assert torch.equal(queue.texts[1, filled], -2.0 * queue.ids[filled])
        assert int(queue.pointer) == (pushed % size if size else 0)


def test_without_ids_rows_belong_to_no_image() -> None:
    queue = FeatureQueue(2, 6)
    queue.push(torch.ones(4, 2), torch.ones(4, 2))
    assert (queue.ids == NO_IMAGE).all()
    assert (queue.images[:, :4] == 1).all()
