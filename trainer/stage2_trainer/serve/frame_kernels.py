"""Drafts of `frame`, computed on a GPU by two Triton kernels; nothing is read back, so the host never waits.

`_scan` looks at every place of every request at once, `_copy` writes the drafts. Positions count from the start of the
example answers, which precede every request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from stage2_trainer.serve import frame
from stage2_trainer.serve.frame import Frame

BLOCK = 256
FOUND = 3
"""What `_scan` finds in each block: a repetition, a number's lead, a name's lead."""


@triton.jit
def _scan(requests, request_stride, rows, lengths, num_sampled, example, EXAMPLE, classes, leads, found,
          stride, LONGEST: tl.constexpr, LEAD: tl.constexpr, ANY: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Find in a block the latest longest repetition of the end, and the last ends of both leads.

    requests: (slots, length) tokens. rows: (requests,) the slot of each. lengths: (slots,). leads: (2, LEAD).
    found: (requests, 3, blocks); a repetition is its length times all positions, plus where it is over.
    """
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + request).to(tl.int64)
    end_of_all = EXAMPLE + tl.load(lengths + row).to(tl.int32)
    result = found + request * 3 * stride + block
    if (block * BLOCK > end_of_all) | (tl.load(num_sampled + request) == 0):
        for kind in tl.static_range(3):
            tl.store(result + kind * stride, 0)
        return
    tokens = requests + row * request_stride - EXAMPLE
    end = block * BLOCK + tl.arange(0, BLOCK)
    length = tl.zeros([BLOCK], tl.int32)
    same = (end > 0) & (end < end_of_all)
    for back in range(1, LONGEST + 1):
        at, of_end = end - back, end_of_all - back
        same = same & (at >= 0) & (of_end >= EXAMPLE)
        token = tl.load(example + at, mask=same & (at < EXAMPLE), other=0)
        token = tl.where(at < EXAMPLE, token, tl.load(tokens + at, mask=same & (at >= EXAMPLE), other=0))
        last = tl.load(tokens + of_end, mask=of_end >= EXAMPLE, other=0)
        same = same & (tl.load(classes + token) == tl.load(classes + last))
        length += same.to(tl.int32)
    repetition = tl.where(length > 0, length * (end_of_all + 1) + end, 0)
    tl.store(result, tl.max(repetition, axis=0))
    for lead in tl.static_range(2):
        ends = (end > EXAMPLE) & (end < end_of_all + lead)  # a number's lead that ends the request has no number yet
        for back in tl.static_range(1, LEAD + 1):
            wanted = tl.load(leads + lead * LEAD + LEAD - back)
            at = end - back
            token = tl.load(tokens + at, mask=ends & (at >= EXAMPLE), other=-3)
            ends = ends & ((wanted == ANY) | (token == wanted))
        tl.store(result + (1 + lead) * stride, tl.max(tl.where(ends, end, 0), axis=0))


@triton.jit
def _token(tokens, example, at, EXAMPLE, end_of_all, mask):
    """Return the tokens at positions; -3, which is none, outside."""
    inside = mask & (at >= 0) & (at < end_of_all)
    of_example = tl.load(example + at, mask=inside & (at < EXAMPLE), other=-3)
    return tl.where(at < EXAMPLE, of_example, tl.load(tokens + at, mask=inside & (at >= EXAMPLE), other=-3))


@triton.jit
def _digit(digits, token):
    """Return the values of digits; -1 for other tokens."""
    return tl.load(digits + tl.maximum(token, 0), mask=token >= 0, other=-1)


@triton.jit
def _last_name(tokens, example, name_end, EXAMPLE, end_of_all, closing, AFTER_NAME, NAME: tl.constexpr):
    """Return what `Frame._last_name` returns. name_end: where the name's lead ends, 0 without one."""
    i = tl.arange(0, NAME)
    since = end_of_all - name_end
    token = _token(tokens, example, name_end + i, EXAMPLE, end_of_all, name_end > 0)
    closes = tl.load(closing + tl.maximum(token, 0), mask=token >= 0, other=0) > 0
    closed = tl.minimum(tl.min(tl.where(closes, i, NAME), axis=0), since)
    wanted = _token(tokens, example, AFTER_NAME + i - closed, EXAMPLE, end_of_all, i >= closed)
    others = tl.sum(((i >= closed) & (i < since) & (token != wanted)).to(tl.int32), axis=0)
    known = (name_end > 0) & (since <= NAME) & (others == 0)
    return tl.where(known, since, 0), AFTER_NAME + since - closed


@triton.jit
def _copy(requests, request_stride, rows, lengths, num_sampled, last_sampled, example, EXAMPLE, classes, closing,
          digits, digit_tokens, leads, found, stride, blocks, drafts, AFTER_NAME,
          SHORTEST: tl.constexpr, NAME: tl.constexpr, DIGITS: tl.constexpr, LEAD: tl.constexpr, ANY: tl.constexpr,
          COORDINATE: tl.constexpr, K: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Write a request's draft: what followed the repetition, its first object number replaced; then its last token.

    drafts: (requests, K). SLOTS, BLOCKS: powers of two that hold K and `blocks`.
    """
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    end_of_all = EXAMPLE + tl.load(lengths + row).to(tl.int32)
    tokens = requests + row * request_stride - EXAMPLE
    block = tl.arange(0, BLOCKS)
    result = found + request * 3 * stride + block
    repetition = tl.max(tl.load(result, mask=block < blocks, other=0), axis=0)
    number_end = tl.max(tl.load(result + stride, mask=block < blocks, other=0), axis=0)
    name_end = tl.max(tl.load(result + 2 * stride, mask=block < blocks, other=0), axis=0)
    length, place = repetition // (end_of_all + 1), repetition % (end_of_all + 1)

    since, after_name = _last_name(tokens, example, name_end, EXAMPLE, end_of_all, closing, AFTER_NAME, NAME)
    unseen = (since > 0) & (length <= since)
    place = tl.where(unseen, after_name, place)
    drafted = (unseen | (length >= SHORTEST)) & (tl.load(num_sampled + request) > 0)

    value = tl.zeros((), tl.int32)  # of the request's last object number
    runs = number_end > 0
    for digit_at in range(DIGITS):
        digit = _digit(digits, _token(tokens, example, number_end + digit_at, EXAMPLE, end_of_all, runs))
        runs = runs & (digit >= 0)
        value = tl.where(runs, value * 10 + digit, value)
    value += 1
    new = 1 + (value >= 10).to(tl.int32) + (value >= 100) + (value >= 1000) + (value >= 10000)

    slot = tl.arange(0, SLOTS)
    starts = _digit(digits, _token(tokens, example, place + slot, EXAMPLE, end_of_all, slot < K)) >= 0
    for back in tl.static_range(1, LEAD + 1):
        wanted = tl.load(leads + LEAD - back)
        before = _token(tokens, example, place + slot - back, EXAMPLE, end_of_all, starts)
        starts = starts & ((wanted == ANY) | (before == wanted))
    first = tl.min(tl.where(starts, slot, SLOTS), axis=0)  # slot of the source's object number
    old = tl.zeros((), tl.int32)  # its digits
    runs = first < SLOTS
    for digit_at in range(DIGITS):
        digit = _digit(digits, _token(tokens, example, place + first + digit_at, EXAMPLE, end_of_all, runs))
        runs = runs & (digit >= 0)
        old += runs.to(tl.int32)
    new = tl.where(first < SLOTS, new, 0)
    source = place + slot + tl.where(slot >= first + new, old - new, 0)
    token = _token(tokens, example, source, EXAMPLE, end_of_all, slot < K)
    in_number = (slot >= first) & (slot < first + new)
    power = tl.full([SLOTS], 1, tl.int32)
    for digit_at in range(DIGITS):
        power = tl.where(first + new - 1 - slot > digit_at, power * 10, power)
    token = tl.where(in_number, tl.load(digit_tokens + (value // power) % 10), token)
    token_class = tl.load(classes + tl.maximum(token, 0), mask=token >= 0, other=COORDINATE)
    stop = tl.min(tl.where(token_class == COORDINATE, slot, SLOTS), axis=0)
    filler = tl.load(last_sampled + row)
    draft = tl.where((slot < stop) & drafted, token.to(tl.int64), filler)
    tl.store(drafts + request * K + slot, draft, mask=slot < K)


class FrameKernels:
    """The kernels with a tokenizer's tables, for at most `slots` requests of at most `longest` tokens each."""

    def __init__(self, of: Frame, most: int, *, slots: int, longest: int, device: torch.device) -> None:
        self._most, self._example_length, self._after_name = most, len(of.example), of.after_name
        leads = torch.tensor([of.number_lead.tolist(), of.name_lead.tolist()], dtype=torch.int32)
        tables = (of.example, of.classes, of.closing, of.digits, of.digit_tokens)
        self._example, self._classes, self._closing, self._digits, self._digit_tokens = (
            torch.from_numpy(table).to(device) for table in tables
        )
        self._leads = leads.to(device)
        self._blocks = triton.cdiv(longest + len(of.example) + 1, BLOCK)
        self._found = torch.zeros((slots, FOUND, self._blocks), dtype=torch.int32, device=device)
        self.drafts = torch.zeros((slots, most), dtype=torch.int64, device=device)

    def draft(
        self, requests: Tensor, rows: Tensor, lengths: Tensor, num_sampled: Tensor, last_sampled: Tensor
    ) -> Tensor:
        """Return the drafts, (requests, most), each filled up with the request's last token, which is seldom right.

        requests: (slots, length) int32 tokens. rows: (requests,) the slot of each request. lengths: (slots,) int32.
        num_sampled: (requests,) tokens that each gained; one that gained none gets no draft. last_sampled: (slots,).
        """
        count = rows.shape[0]
        shared = (requests, requests.stride(0), rows, lengths, num_sampled)
        example = (self._example, self._example_length, self._classes)
        found = (self._found, self._blocks)
        _scan[count, self._blocks](
            *shared, *example, self._leads, *found,
            LONGEST=frame.LONGEST_REPETITION, LEAD=frame.LEAD, ANY=frame.ANY, BLOCK=BLOCK,
        )  # fmt: skip
        _copy[count,](
            *shared, last_sampled, *example, self._closing, self._digits, self._digit_tokens, self._leads, *found,
            self._blocks, self.drafts, self._after_name, SHORTEST=frame.SHORTEST_REPETITION, NAME=frame.LONGEST_NAME,
            DIGITS=frame.LONGEST_NUMBER, LEAD=frame.LEAD, ANY=frame.ANY, COORDINATE=frame.COORDINATE, K=self._most,
            SLOTS=triton.next_power_of_2(self._most), BLOCKS=triton.next_power_of_2(self._blocks),
        )  # fmt: skip
        return self.drafts[:count]
