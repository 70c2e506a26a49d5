"""Pre-training for NLVR2: to which of two pictures does a text belong, or to neither (§5, appendix A)."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.albef.checkpoints import load_parts
from models.albef.config import TextAssignmentConfig
from models.albef.pairs import PairReader, Shown
from models.albef.starting import towers_of, with_doubled_blocks

FIRST, SECOND, NEITHER = range(3)


class Assignment(NamedTuple):
    """Which pictures of the batch each text is shown with, and the class that is right; all (B,) int64."""

    first: Tensor
    second: Tensor
    labels: Tensor


class AlbefTextAssignment(PairReader):
    """Both encoders and the head `ta_head`. The projections only choose hard negatives, and stay as they were."""

    def __init__(self, config: TextAssignmentConfig) -> None:
        super().__init__(config, config.sharing)
        self.config = config
        self.vision_proj = nn.Linear(config.vision_width, config.embed_dim).requires_grad_(False)
        self.text_proj = nn.Linear(config.text_width, config.embed_dim).requires_grad_(False)
        self.temp = nn.Parameter(torch.tensor(config.temperature), requires_grad=False)
        self.ta_head = nn.Linear(config.text_width, 3)

    @classmethod
    def from_pretraining(cls, state_dict: Mapping[str, Tensor], config: TextAssignmentConfig) -> Self:
        """Start from `student_state_dict` of a pre-trained model, each fusion layer used twice, with a new head.

        Raises ValueError where the weights do not fit the config.
        """
        model = cls(config)
        load_parts(model, with_doubled_blocks(towers_of(state_dict), config), new=("ta_head.",))
        return model

    def forward(
        self,
        images: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        generator: torch.Generator | None = None,
        *,
        assignment: Assignment | None = None,
    ) -> Tensor:
        """The loss (scalar) on B different pictures (B, 3, S, S) and one text of each (B, L).

        `generator`, on the images' device, draws the pairs; `assignment` replaces the draw. Raises ValueError for a
        single pair, which has no other picture.
        """
        if images.shape[0] != input_ids.shape[0] or images.shape[0] < 2:
            raise ValueError(f"{images.shape[0]} pictures and {input_ids.shape[0]} texts: equal numbers above 1 wanted")
        tokens = self.visual_encoder(images)  # (B, 1 + N, Dv)
        if assignment is None:
            with torch.no_grad():
                feature = F.normalize(self.vision_proj(tokens[:, 0]), dim=-1).float()  # (B, E)
            # the published code divides by the temperature's starting value, not by the learned one
            assignment = draw_assignment(feature @ feature.T / self.config.temperature, generator)
        shown = Shown(tokens, assignment.first), Shown(tokens, assignment.second)
        hidden = self.read_pair(*shown, input_ids, attention_mask)
        return F.cross_entropy(self.ta_head(hidden[:, 0]), assignment.labels)


@torch.no_grad()
def draw_assignment(similarity: Tensor, generator: torch.Generator | None = None) -> Assignment:
    """A third of the texts each: own picture first, own picture second, neither.

    Other pictures are drawn by the softmax of `similarity` (B, B) over them, without replacement. A batch of two has
    no text shown with neither.
    """
    rows, device = similarity.shape[0], similarity.device
    own = torch.arange(rows, device=device)
    uniform = torch.rand(rows, rows, generator=generator, device=device).clamp(1e-9, 1 - 1e-7)
    # the largest of logits with Gumbel noise are draws without replacement from their softmax
    noisy = (similarity - (-uniform.log()).log()).masked_fill(
        torch.eye(rows, dtype=torch.bool, device=device), -torch.inf
    )
    others = noisy.topk(2, dim=1).indices  # (B, 2); with two rows the second is the text's own
    labels = torch.randint(3 if rows > 2 else 2, (rows,), generator=generator, device=device)
    first = torch.where(labels == FIRST, own, others[:, 0])
    second = torch.where(labels == SECOND, own, others[:, 0])
    return Assignment(first, torch.where(labels == NEITHER, others[:, 1], second), labels)
