"""Exact attention over splits of K and V, in any order, with memory that does not depend on their number.

The online softmax of Milakov and Gimelshein (arXiv 1805.02867), split over the keys as in flash-decoding
(https://pytorch.org/blog/flash-decoding): each split gives an output and a log-sum-exp, merged in float32.

Query heads that share a K, V head are packed as query rows, so K and V are never repeated:

    query [B, Hkv * G, Q, D] ──▶ rows [B, Hkv, G * Q, D]        row g * Q + q is query q of the group's head g
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.errors import ConfigError
from ..core.metrics import L0Account, tensor_bytes
from ..core.row_map import RowGroup, RowMap
from .kernels import Result, Scoring, attend

# Blocks are read in place if they have at least this many tokens per query row. Otherwise their outputs, one per
# block and row, would take more memory than a contiguous copy of K and V.
_TOKENS_PER_ROW = 8


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """The properties of a model's causal attention.

    Args:
        scale: factor on the scores; `1 / sqrt(Dk)` when `None`.
        softcap: if given, the scores are then capped by `softcap * tanh(score / softcap)`.
        sinks: `[Hq]`, per head the score of a key without a value, which takes part in the softmax (attention
            sinks, arXiv 2508.10925).
        mask: the visible tokens: `[B or 1, 1 or Hq, 1 or Q, S]` for `Q` queries and a sequence of `S` tokens, bool
            (`True`: visible) or added to the scores. A mask with a row for each of several queries includes
            causality.
        masked_tokens: in a mask with one row for all queries, no token from this one on is masked; `None` if that
            is not known.
        dtype: dtype to which queries, keys and values are rounded first, as by `torch.autocast`; `None` for none.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    masked_tokens: int | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, rule: AttentionRule | None) -> AttentionRule:
        """Return the given rule, or plain causal attention for `None`.

        Raises:
            ConfigError: it is something else.
        """
        if rule is not None and not isinstance(rule, cls):
            raise ConfigError(f"rule={rule!r}: pass an AttentionRule, or None")
        return rule or cls()

    def check_fits(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tokens: int) -> None:
        """Raise unless query and mask fit new K and V `[B, H, Q, D]` at the end of a sequence of `tokens`.

        Raises:
            ConfigError: they do not.
        """
        if not isinstance(query, torch.Tensor):
            raise ConfigError(f"query is {type(query).__name__}: pass a tensor [B, Hq, T, D]")
        batch, kv_heads, queries, key_dim = key.shape
        heads = query.shape[1] if query.ndim == 4 else 0
        if query.shape != (batch, heads, queries, key_dim) or heads % kv_heads or query.dtype != key.dtype:
            raise ConfigError(
                f"query {tuple(query.shape)} of {query.dtype} does not fit key {tuple(key.shape)} of {key.dtype}: "
                "it must be [B, Hq, T, D] of the same tokens, with heads a multiple of the key's"
            )
        if value.shape[1] != kv_heads:
            raise ConfigError(
                f"key has {kv_heads} heads and value {value.shape[1]}: they must have the same number"
            )
        allowed = ((1, batch), (1, heads), (1, queries), (tokens,))
        shape = (1, 1, 1, tokens) if self.mask is None else tuple(self.mask.shape)
        if len(shape) != 4 or any(size not in sizes for size, sizes in zip(shape, allowed, strict=True)):
            raise ConfigError(
                f"a mask of shape {shape} does not fit {queries} queries of {heads} heads in a batch of {batch} "
                f"and {tokens} tokens: it must be [batch or 1, 1 or heads, 1 or queries, tokens]"
            )


class OnlineAttention:
    """The attention of one layer's queries: add every split of K and V once, then call `finish`.

    All work is enqueued on the current stream; nothing blocks. Use it in a `with` block, which accounts for its
    memory.

    Args:
        query: `[B, Hq, Q, Dk]`, the newest `Q` tokens of the sequence.
        kv_heads: heads of K and V, a divisor of `Hq`.
        value_dim: `Dv`.
        rule: properties of the attention.
        account: counts every tensor that is allocated here.
    """

    def __init__(
        self,
        query: torch.Tensor,
        kv_heads: int,
        value_dim: int,
        rule: AttentionRule,
        account: L0Account | None = None,
    ) -> None:
        given, query = query, query.to(rule.dtype or query.dtype)
        batch, heads, queries, key_dim = query.shape
        self._batch, self._queries, self._groups = batch, queries, heads // kv_heads
        self._dtype = query.dtype
        self._rule = rule
        self._scale = key_dim**-0.5 if rule.scale is None else rule.scale
        self._mask_per_row = rule.mask is not None and (rule.mask.shape[1] > 1 or rule.mask.shape[2] > 1)
        self._mask_is_causal = rule.mask is not None and rule.mask.shape[2] > 1
        self._account = account or L0Account()
        exact = torch.promote_types(query.dtype, torch.float32)
        rows = self._groups * queries
        self._rows = query.unflatten(1, (kv_heads, self._groups)).flatten(2, 3)
        self._output = query.new_zeros(batch, kv_heads, rows, value_dim, dtype=exact)
        self._lse = query.new_full((batch, kv_heads, rows), -torch.inf, dtype=exact)
        self._held_bytes = tensor_bytes(_if_new(self._rows, given), self._output, self._lse)
        self._account.add(self._held_bytes)

    def add(self, key: torch.Tensor, value: torch.Tensor, start: int, *, newest: bool = False) -> None:
        """Add K and V of the tokens from position `start` on.

        Args:
            key: `[B, Hkv, T, Dk]`.
            value: `[B, Hkv, T, Dv]`.
            start: position of the first of them.
            newest: whether they are the queries' own tokens (`T == Q`), causal among themselves. All others must
                be older than the queries.
        """
        bias = self._bias(start, key.shape[2])
        causal = newest and self._queries > 1 and not self._mask_is_causal
        with self._account.temporary(bias):
            if not causal and not self._mask_per_row:
                self._merge(slice(None), slice(None), *self._attend(self._rows, key, value, bias))
                return
            for group in range(self._groups):  # here a row's position in its group matters
                rows = slice(group * self._queries, (group + 1) * self._queries)
                own_bias = bias
                if bias is not None and bias.shape[1] > 1:
                    own_bias = bias[:, group :: self._groups]
                self._merge(slice(None), rows, *self._attend(self._rows[:, :, rows], key, value, own_bias, causal))

    def add_blocks(self, keys: torch.Tensor, values: torch.Tensor, start: int, row_map: RowMap) -> None:
        """Add consecutive sealed blocks as they are stored, without a copy when there are few query rows.

        Args:
            keys: `[n, stored rows, Hkv, T, Dk]`.
            values: `[n, stored rows, Hkv, T, Dv]`.
            start: position of the first block's first token.
            row_map: for each batch row the stored row that it reads.
        """
        blocks, stored_rows, _, tokens, _ = keys.shape
        identity = row_map.is_identity(stored_rows)
        if self._mask_per_row or self._rows.shape[2] * _TOKENS_PER_ROW > tokens:
            key, value = (_side_by_side(states, None if identity else row_map) for states in (keys, values))
            with self._account.temporary(_if_new(key, keys), _if_new(value, values)):
                self.add(key, value, start)
            return
        bias = self._bias(start, blocks * tokens)
        with self._account.temporary(bias):
            if bias is not None:
                bias = bias.unflatten(-1, (blocks, tokens)).permute(3, 0, 1, 2, 4)  # [n, B or 1, 1, 1, T]
                bias = bias.expand(-1, self._batch, -1, -1, -1)
            if identity:
                self._merge(slice(None), slice(None), *self._attend_split(self._rows, keys, values, bias))
                return
            for group in row_map.groups(keys.device):
                stored = slice(group.stored_row, group.stored_row + 1)
                self._add_stored_row(keys[:, stored], values[:, stored], group, bias)

    def finish(self) -> torch.Tensor:
        """Return the output `[B, Q, Hq, Dv]`, contiguous, in the rule's dtype or the query's.

        Nothing can be added afterwards.
        """
        if self._rule.sinks is not None:
            sinks = self._rule.sinks.to(self._lse.dtype).view(-1, self._groups)
            per_row = sinks.repeat_interleave(self._queries, dim=1)
            self._output.mul_(torch.sigmoid(self._lse - per_row).unsqueeze(-1))
        output = self._output.unflatten(2, (self._groups, self._queries)).permute(0, 3, 1, 2, 4)
        result = torch.empty(output.shape, dtype=self._dtype, device=output.device)
        with self._account.temporary(result):  # the model owns it afterwards
            return result.copy_(output).flatten(2, 3)

    def __enter__(self) -> OnlineAttention:
        return self

    def __exit__(self, *exception: object) -> None:
        """Free everything that this holds."""
        self._account.add(-self._held_bytes)

    def _add_stored_row(
        self, keys: torch.Tensor, values: torch.Tensor, group: RowGroup, bias: torch.Tensor | None
    ) -> None:
        """Add one stored row `[n, 1, Hkv, T, D]` for all batch rows that read it, query rows side by side."""
        rows = self._rows.index_select(0, group.index)  # [m, Hkv, R, Dk]
        if bias is not None:
            bias = bias.index_select(1, group.index).expand(-1, -1, -1, rows.shape[2], -1)  # [n, m, 1, R, T]
            bias = bias.transpose(1, 2).flatten(2, 3).unsqueeze(1)
        output, lse = self._attend_split(rows.transpose(0, 1).flatten(1, 2).unsqueeze(0), keys, values, bias)
        outputs, lses = (part[0].unflatten(1, (len(group.members), -1)) for part in (output, lse))
        for position, member in enumerate(group.members):
            self._merge(
                slice(member, member + 1), slice(None), outputs[None, :, position], lses[None, :, position]
            )

    def _attend_split(
        self, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> Result:
        """Compute attention of rows `[b, Hkv, R, Dk]` over blocks `[n, b, Hkv, T, D]` as one batch dimension."""
        blocks = keys.shape[0]
        repeated = rows.expand(blocks, *rows.shape).flatten(0, 1)
        if bias is not None:
            bias = bias.flatten(0, 1)
        with self._account.temporary(_if_new(repeated, rows), bias):
            outputs, lses = self._attend(repeated, keys.flatten(0, 1), values.flatten(0, 1), bias)
            outputs, lses = outputs.unflatten(0, (blocks, -1)), lses.unflatten(0, (blocks, -1))
            lse = torch.logsumexp(lses, dim=0)
            weights = (lses - lse).exp_().unsqueeze(-1)
            with self._account.temporary(outputs, lses, weights, weights):
                weighted = outputs.to(weights.dtype)
                with self._account.temporary(_if_new(weighted, outputs)):
                    return weighted.mul_(weights).sum(dim=0), lse

    def _attend(
        self,
        rows: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        causal: bool = False,
    ) -> Result:
        scoring = Scoring(self._scale, self._rule.softcap, bias, causal)
        keys, values = key.to(rows.dtype), value.to(rows.dtype)
        with self._account.temporary(_if_new(keys, key), _if_new(values, value)):
            return attend(rows, keys, values, scoring, self._account)

    def _merge(self, members: slice, rows: slice, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the result of a split into the running result of some batch members and query rows."""
        all_output, all_lse = self._output[members, :, rows], self._lse[members, :, rows]
        joined = torch.logaddexp(all_lse, lse)
        kept, added = (all_lse - joined).exp_(), (lse - joined).exp_()
        converted = output.to(all_output.dtype)
        with self._account.temporary(output, lse, joined, kept, added, _if_new(converted, output)):
            all_output.mul_(kept.unsqueeze(-1)).addcmul_(converted, added.unsqueeze(-1))
            all_lse.copy_(joined)

    def _bias(self, start: int, tokens: int) -> torch.Tensor | None:
        """Return the mask over some tokens as a finite bias on the scores, `None` if it hides none of them."""
        mask, masked_tokens = self._rule.mask, self._rule.masked_tokens
        if mask is None or (masked_tokens is not None and start >= masked_tokens):
            return None
        part = mask[..., start : start + tokens]
        # Not -inf, or a row without a visible key would become NaN. Half, because kernels multiply it by log2(e).
        lowest = torch.finfo(self._dtype).min / 2
        if part.dtype is torch.bool:
            return torch.zeros_like(part, dtype=self._dtype).masked_fill_(part.logical_not(), lowest)
        return part.to(self._dtype).clamp(min=lowest)


def _side_by_side(states: torch.Tensor, row_map: RowMap | None) -> torch.Tensor:
    """Blocks `[n, stored rows, H, T, D]` as one `[B, H, n * T, D]`; a view for one block, else a copy."""
    if row_map is not None:
        states = states.index_select(1, row_map.index(states.device))
    return states.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _if_new(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """Return the result of an operation, or `None` if it is a view of its source."""
    return None if result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr() else result
