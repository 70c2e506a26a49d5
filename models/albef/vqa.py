"""ALBEF fine-tuned for visual question answering: an answer decoder reads the fused question (§5)."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from models.albef.checkpoints import load_parts
from models.albef.config import VqaConfig
from models.albef.reading import Reader, Taught, check_batch
from models.albef.starting import decoder_of, encoders_of, start_teacher
from models.albef.text import TextEncoder, allowed

KEYS_AND_VALUES = (".crossattention.self.key.", ".crossattention.self.value.")


class AnswerDecoder(TextEncoder):
    """BERT layers that see earlier tokens of the answer and all of the question, and a vocabulary head."""

    def __init__(self, config: VqaConfig) -> None:
        super().__init__(config, mlm_head=True, contexts=[config.text_width] * config.decoder_layers)

    def decode(
        self, answer_ids: Tensor, answer_mask: Tensor, question: Tensor, question_mask: Tensor, rows: Tensor | None
    ) -> Tensor:
        """Hidden states (A, L, D) of answers (A, L), each about row `rows[a]` (its own when None) of questions.

        `question` (B, Lq, D) are multimodal tokens, `question_mask` (B, Lq) is 1 at tokens.
        """
        hidden: Tensor = self.bert.embeddings(answer_ids)
        length = answer_ids.shape[1]
        earlier = torch.ones(length, length, dtype=torch.bool, device=answer_ids.device).tril()
        mask = allowed(answer_mask) & earlier  # (A, 1, L, L)
        question_mask = allowed(question_mask if rows is None else question_mask[rows])  # (A, 1, 1, Lq)
        for layer in self.bert.layers:
            hidden = layer(hidden, mask, question, rows, question_mask)
        return hidden


class VqaReader(Reader):
    """Both encoders and the answer decoder."""

    def __init__(self, config: VqaConfig) -> None:
        super().__init__(config)
        self.text_decoder = AnswerDecoder(config)

    def predictions(
        self,
        question: Tensor,
        question_mask: Tensor,
        answer_ids: Tensor,
        answer_mask: Tensor,
        rows: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        """Vocabulary logits (M, V) for the answer tokens that `chosen` (A, L - 1) marks among all but the first."""
        hidden = self.text_decoder.decode(answer_ids, answer_mask, question, question_mask, rows)
        return self.text_decoder.predict_tokens(hidden[:, :-1][chosen])


class Ranking(NamedTuple):
    """For each of B questions its k best candidates, best first: indices (B, k) and probabilities among them (B, k)."""

    candidates: Tensor
    probabilities: Tensor


class AlbefVqa(VqaReader, Taught):
    """The student and its teacher."""

    def __init__(self, config: VqaConfig) -> None:
        super().__init__(config)
        self.config: VqaConfig = config
        self.hire(VqaReader(config))

    @classmethod
    def from_pretraining(
        cls, state_dict: Mapping[str, Tensor], config: VqaConfig, training: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Start from `student_state_dict` of a pre-trained model.

        The teacher goes on from that in `training` (see `start_teacher`), or else starts equal.

        The decoder starts as the fusion layers and the vocabulary head. Its cross-attention reads text tokens where
        theirs read image tokens, so its keys and values are new where the two widths differ. Raises ValueError where
        the weights do not fit the config.
        """
        model = cls(config)
        same = config.vision_width == config.text_width

        def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return encoders_of(weights) | decoder_of(weights, config, skip_key_value=not same)

        new = () if same else KEYS_AND_VALUES
        load_parts(model, renamed(state_dict), new)
        model.reset_teacher()
        start_teacher(model, training, renamed, new)
        return model

    def forward(
        self,
        images: Tensor,
        question_ids: Tensor,
        question_mask: Tensor,
        answer_ids: Tensor,
        answer_mask: Tensor,
        answer_rows: Tensor,
        weights: Tensor,
        alpha: float,
    ) -> Tensor:
        """The loss (scalar) on B pictures (B, 3, S, S) with questions (B, Lq) and A answers (A, La) of them.

        Answer a belongs to question `answer_rows[a]` and weighs `weights[a]` float; its tokens' losses are summed, the
        answers' by weight, and the sum divided by B. `alpha` in [0, 1] weighs the teacher; the teacher moves at every
        call. Raises ValueError for shapes that disagree.
        """
        rows = images.shape[0]
        check_batch(alpha, rows, question_ids=question_ids)
        check_batch(alpha, answer_ids.shape[0], answer_rows=answer_rows, weights=weights)
        chosen = answer_ids[:, 1:] != self.config.pad_id  # (A, L - 1), M of them
        targets = answer_ids[:, 1:][chosen]  # (M,)
        answers = (answer_ids, answer_mask, answer_rows, chosen)
        logits = self.predictions(self.read(images, question_ids, question_mask), question_mask, *answers)
        losses = F.cross_entropy(logits, targets, reduction="none")  # (M,)
        with torch.no_grad():
            self.move_teacher()
            soft = None
            if alpha > 0:
                assert isinstance(self.teacher, VqaReader)
                question = self.teacher.read(images, question_ids, question_mask)
                soft = self.teacher.predictions(question, question_mask, *answers).softmax(dim=1)
        if soft is not None:
            losses = (1 - alpha) * losses - alpha * (soft * logits.log_softmax(dim=1)).sum(dim=1)
        of_answer = chosen.nonzero()[:, 0]  # (M,)
        return (losses * weights[of_answer]).sum() / rows

    @torch.no_grad()
    def rank(
        self,
        images: Tensor,
        question_ids: Tensor,
        question_mask: Tensor,
        candidate_ids: Tensor,
        candidate_mask: Tensor,
        k: int,
        rows_at_once: int = 256,
    ) -> Ranking:
        """The best of C candidate answers (C, L) for each question, as published.

        The `k` candidates with the likeliest first token (all of them where there are fewer) are scored by the log
        likelihood of all their tokens; the published code adds that of the first token once more, so this does too.
        """
        question = self.read(images, question_ids, question_mask)  # (B, Lq, D)
        count, k = question.shape[0], min(k, candidate_ids.shape[0])
        start = candidate_ids[:1, :1].expand(count, 1)
        hidden = self.text_decoder.decode(start, torch.ones_like(start), question, question_mask, None)
        first = self.text_decoder.predict_tokens(hidden[:, 0]).float().log_softmax(dim=1)  # (B, V)
        best, top = first[:, candidate_ids[:, 1]].topk(k, dim=1)  # (B, k)
        chosen, rows = top.flatten(), torch.arange(count, device=top.device).repeat_interleave(k)  # (B * k,)
        scores = torch.cat(
            [
                self._log_likelihood(question, question_mask, candidate_ids[some], candidate_mask[some], of)
                for some, of in zip(chosen.split(rows_at_once), rows.split(rows_at_once), strict=True)
            ]
        ).view(count, k)
        probabilities, order = (best + scores).softmax(dim=1).sort(dim=1, descending=True, stable=True)
        return Ranking(top.gather(1, order), probabilities)

    @torch.no_grad()
    def generate(self, images: Tensor, question_ids: Tensor, question_mask: Tensor, max_tokens: int = 10) -> Tensor:
        """Answers (B, L) int64 by likeliest next tokens, [CLS] first, [PAD] after [SEP]; `max_tokens` more at most."""
        question = self.read(images, question_ids, question_mask)
        ids = question_ids.new_full((question.shape[0], 1), self.config.cls_id)
        going = torch.ones_like(ids[:, 0], dtype=torch.bool)
        for _ in range(min(max_tokens, self.config.max_positions - 1)):
            hidden = self.text_decoder.decode(ids, torch.ones_like(ids), question, question_mask, None)
            token = self.text_decoder.predict_tokens(hidden[:, -1]).argmax(dim=1)
            ids = torch.cat([ids, torch.where(going, token, self.config.pad_id)[:, None]], dim=1)
            going &= token != self.config.sep_id
            if not going.any():
                break
        return ids

    def _log_likelihood(
        self, question: Tensor, question_mask: Tensor, answer_ids: Tensor, answer_mask: Tensor, rows: Tensor
    ) -> Tensor:
        """Log likelihood (A,) float32 of answers (A, L) about rows (A,) of the questions."""
        chosen = answer_ids[:, 1:] != self.config.pad_id
        logits = self.predictions(question, question_mask, answer_ids, answer_mask, rows, chosen)
        losses = F.cross_entropy(logits.float(), answer_ids[:, 1:][chosen], reduction="none")  # (M,)
        return -torch.zeros(len(answer_ids), device=losses.device).index_add_(0, chosen.nonzero()[:, 0], losses)
