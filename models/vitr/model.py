"""VITR's relational reasoning, alignment and fusion over the outputs of frozen encoders (paper sections 3.3 to 3.5).

Shapes use: P pictures, C captions, k regions, n words (padded), d1 to d4 as in `VitrConfig`. Everything that does not
depend on the caption is computed once per picture, everything that does not depend on the picture once per caption.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from models.towers.lengths import caption_lengths, score_by_length
from models.vitr.config import VitrConfig

# Under a square root: keeps the gradient finite at 0 and is far below what float32 sums can see.
TINY = 1e-24
CPU_CAPTIONS = 16  # at once on a processor: of like length, and within its cache


class Alignment(NamedTuple):
    """Words and the part of the picture that answers to each."""

    attention: Tensor  # (P, C, k, n): a_ij of eq. 10; columns of padded words are uniform and unused
    aligned: Tensor  # (P, C, n, d3): v_rela of eq. 9


class RelationalReasoning(nn.Module):
    """One repetition of eq. 4 to 8: each region is scaled by how much it matters among its relations."""

    def __init__(self, regions: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.pairwise = nn.Linear(2 * regions, regions)  # a 1-D convolution of kernel 1 over the columns
        self.inner = nn.Linear(width, 1)
        self.attention = nn.Linear(regions + 1, 1)

    def forward(self, regions: Tensor) -> Tensor:
        """(P, k, d3) to (P, k, d3)."""
        relations = self.query(regions) @ self.key(regions).transpose(1, 2)  # (P, k, k)   eq. 4
        stacked = torch.cat([relations.transpose(1, 2), relations], dim=1)  # (P, 2k, k)
        pairwise = self.pairwise(stacked.transpose(1, 2)).transpose(1, 2).tanh()  # (P, k, k)   eq. 5
        inner = self.inner(regions).tanh()  # (P, k, 1)   eq. 6
        attention = self.attention(torch.cat([pairwise, inner], dim=2)).tanh()  # (P, k, 1)   eq. 7
        scaled: Tensor = attention.sigmoid() * regions  # eq. 8
        return scaled


class FusionGraph(nn.Module):
    """One repetition of eq. 16 and 17 over the joined global and local nodes."""

    def __init__(self, width: int, fusion: str) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.fuse = nn.Linear(width, width)
        self.fusion = fusion

    def forward(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Nodes (P, C, n + 1, d4) and mask (C, n + 1) of real nodes, to (P, C, n + 1, d4)."""
        edges = self.query(nodes) @ self.key(nodes).transpose(2, 3)  # (P, C, n + 1, n + 1)   eq. 16
        gates = edges.sigmoid() * mask[None, :, None, :]  # padded nodes send nothing
        if self.fusion == "self":
            message = gates.sum(dim=3, keepdim=True) * nodes
        else:
            message = gates @ nodes
        # The layer stands inside the sum of eq. 17, so its bias counts once for each node summed over.
        count = mask.sum(dim=1).to(nodes.dtype)[None, :, None, None]
        return F.linear(message, self.fuse.weight) + count * self.fuse.bias


class Vitr(nn.Module):
    """Scores pictures against captions from their global vectors, regions and words."""

    def __init__(self, config: VitrConfig) -> None:
        super().__init__()
        self.config = config
        self.region_projection = nn.Linear(config.region_width, config.local_width)  # eq. 2
        self.word_projection = nn.Linear(config.global_width, config.local_width)  # eq. 3

        def steps(make: type[nn.Module], count: int, *sizes: int | str) -> nn.ModuleList:
            distinct = min(count, 1) if config.share_steps else count
            return nn.ModuleList(make(*sizes) for _ in range(distinct))

        width = config.local_width
        self.reasoning = nn.ModuleList()
        if config.relations:
            self.reasoning = steps(RelationalReasoning, config.reasoning_steps, config.regions, width)
        else:
            self.region_gru = nn.GRU(width, width, batch_first=True)
            self.word_gru = nn.GRU(width, width, batch_first=True)
        self.global_join = nn.Linear(config.global_width, config.join_width)  # eq. 14
        self.local_join = nn.Linear(config.local_width, config.join_width)  # eq. 15
        self.fusion = steps(FusionGraph, config.fusion_steps, config.join_width, config.fusion)
        self.gru = nn.GRU(config.join_width, config.join_width, batch_first=True)
        self.score = nn.Linear(config.join_width, 1)

    def reason(self, regions: Tensor) -> Tensor:
        """Regions (P, k, d2) to reasoned regions (P, k, d3): eq. 2 and 4 to 8. Once per picture."""
        if regions.shape[1:] != (self.config.regions, self.config.region_width):
            raise ValueError(
                f"regions are {tuple(regions.shape)}, expected (pictures, {self.config.regions}, "
                f"{self.config.region_width})"
            )
        reasoned: Tensor = self.region_projection(regions)
        for step in range(self.config.reasoning_steps):
            reasoned = self.reasoning[0 if self.config.share_steps else step](reasoned)
        return reasoned

    def align(self, reasoned: Tensor, words: Tensor, mask: Tensor) -> Alignment:
        """Reasoned regions (P, k, d3) against projected words (C, n, d3) with mask (C, n): eq. 9 to 11."""
        cosine = torch.einsum(
            "pkd,cnd->pckn", F.normalize(reasoned, dim=2, eps=1e-12), F.normalize(words, dim=2, eps=1e-12)
        )
        positive = cosine.relu() * mask[None, :, None, :]  # (P, C, k, n)
        norm = positive.square().sum(dim=3, keepdim=True).clamp(min=TINY).sqrt()  # over the caption's words
        attention = (self.config.gamma * positive / norm).softmax(dim=2)  # over regions   eq. 10, 11
        return Alignment(attention, torch.einsum("pckn,pkd->pcnd", attention, reasoned))  # eq. 9

    def sum_up(self, regions: Tensor, words: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """VITR-NoRel's part of the picture (P, 1, 1, d3), caption (C, 1, d3) and mask (C, 1): one local node a pair."""
        lengths = caption_lengths(mask).cpu()
        packed = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        picture = self.region_gru(self.region_projection(regions))[1][0]  # (P, d3)
        caption = self.word_gru(packed)[1][0]  # (C, d3)
        return picture[:, None, None], caption[:, None], mask.new_ones(len(mask), 1)

    def join(self, aligned: Tensor, words: Tensor, image_global: Tensor, text_global: Tensor) -> Tensor:
        """The graph's first nodes (P, C, n + 1, d4), the global one first: eq. 12 to 15."""
        global_node = self.global_join((text_global[None] - image_global[:, None]).square())  # (P, C, d4)
        local_nodes = self.local_join((words[None] - aligned).square())  # (P, C, n, d4)
        return torch.cat([global_node[:, :, None], local_nodes], dim=2)

    def fuse(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Nodes (P, C, n + 1, d4) after eq. 16 and 17, with mask (C, n) of the words."""
        node_mask = F.pad(mask.bool(), (1, 0), value=True)  # the global node is always there
        for step in range(self.config.fusion_steps):
            nodes = self.fusion[0 if self.config.share_steps else step](nodes, node_mask)
        return nodes

    def read(self, nodes: Tensor, mask: Tensor) -> Tensor:
        """Scores (P, C) from the fused nodes (P, C, n + 1, d4): eq. 18 and 19."""
        pictures, captions = nodes.shape[:2]
        if self.config.read_state == "first":
            nodes, last = nodes[:, :, :1], torch.zeros(captions, dtype=torch.long, device=nodes.device)
        else:
            last = mask.sum(dim=1).long()  # the global node stands before the words
        states, _ = self.gru(nodes.flatten(0, 1))  # (P * C, 1 or n + 1, d4)
        states = states.unflatten(0, (pictures, captions))
        chosen = states[:, torch.arange(captions, device=nodes.device), last]  # (P, C, d4)
        score: Tensor = self.score(chosen).squeeze(2).sigmoid()
        return score

    def forward(
        self, regions: Tensor, image_global: Tensor, words: Tensor, mask: Tensor, text_global: Tensor
    ) -> Tensor:
        """Scores (P, C) in (0, 1) of every picture with every caption.

        Args:
            regions: (P, k, d2) features of the local encoder.
            image_global: (P, d1) of the dual encoder.
            words: (C, n, d1) word features of the dual encoder, padded at the end.
            mask: (C, n), true or 1 where a word stands; at least one word a caption.
            text_global: (C, d1) of the dual encoder.

        Raises:
            ValueError: when the regions have other sizes than the configuration, or a caption has no word.

        """
        if self.config.relations:
            local = self.reason(regions)  # (P, k, d3)
        else:
            local, words, mask = self.sum_up(regions, self.word_projection(words), mask)

        def block(chosen: Tensor, longest: int) -> Tensor:
            own, own_mask = words[chosen, :longest], mask[chosen, :longest]
            if self.config.relations:
                own = self.word_projection(own)  # (c, n, d3); not of all captions at once, padded to their longest
                aligned = self.align(local, own, own_mask).aligned  # (P, c, n, d3)
            else:
                aligned = local
            nodes = self.join(aligned, own, image_global, text_global[chosen])
            return self.read(self.fuse(nodes, own_mask), own_mask)

        return score_by_length(mask, CPU_CAPTIONS if words.device.type == "cpu" else len(words), block)


def heat_map(attention: Tensor, mask: Tensor) -> Tensor:
    """How much each region answers to a caption, in [0, 1]: the mean of its weights over words, scaled (figure 4).

    Attention (..., k, n) and mask (..., n) to (..., k). Regions that all weigh the same give zeros.
    """
    weights = mask.to(attention.dtype)[..., None, :]
    mean = (attention * weights).sum(dim=-1) / weights.sum(dim=-1)
    low, high = mean.amin(dim=-1, keepdim=True), mean.amax(dim=-1, keepdim=True)
    return (mean - low) / (high - low).clamp(min=torch.finfo(mean.dtype).eps)
