"""The buffer shuffles around the two Ulysses all-to-alls, in plain torch.

Every other implementation is tested against these. Buffers are laid out so that the collective is flat: block ``s`` of
a send buffer goes to SP rank ``s``, and block ``s`` of a receive buffer came from it. In all of them ``n`` is the rows
a rank (padding included), ``sp`` the SP degree and ``T`` the tokens of the batch, ``T <= sp * n``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sp_size: int, kv_head_map: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Pack Q, K and V of this rank's tokens into one send buffer, one block per SP rank.

    Args:
        q: [n, heads, head_dim], the base model's query heads; ``heads`` is a multiple of ``sp_size``.
        k: [n, kv_heads, head_dim].
        v: [n, kv_heads, v_head_dim], same dtype and device as q and k.
        kv_head_map: for each SP rank the KV heads it is sent; a head may go to several ranks (replication).

    Returns:
        Contiguous [sp, n, width], each row being ``heads/sp`` query heads, then its K heads, then its V heads.
    """
    n, heads, head_dim = q.shape
    each = len(kv_head_map[0])
    q_width, k_width, v_width = heads // sp_size * head_dim, each * k.shape[2], each * v.shape[2]
    send = q.new_empty(sp_size, n, q_width + k_width + v_width)
    to_q, to_k, to_v = send.split([q_width, k_width, v_width], dim=-1)
    to_q.copy_(q.reshape(n, sp_size, q_width).transpose(0, 1))
    for source, target, width in ((k, to_k, k_width), (v, to_v, v_width)):
        for rank, kv_heads in enumerate(kv_head_map):
            first = kv_heads[0]  # a rank's KV heads are neighbours: HeadLayout.kv_head_map
            target[rank].copy_(source[:, first : first + each].reshape(n, width))
    return send


def unpack_qkv(
    received: torch.Tensor, num_tokens: int, q_width: int, k_width: int, v_width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the received buffer [sp, n, width] into contiguous q [T, q_width], k [T, k_width] and v [T, v_width].

    The blocks arrive in token order (SP rank s holds rows [s*n, (s+1)*n)), so only the padding behind the last token
    is dropped: it never reaches attention or the KV cache.
    """
    rows = received.flatten(0, 1)[:num_tokens]
    q, k, v = rows.split([q_width, k_width, v_width], dim=-1)
    return q.contiguous(), k.contiguous(), v.contiguous()


def pack_output(output: torch.Tensor, sp_size: int, rows: int) -> torch.Tensor:
    """Attention output [T, width] as the send buffer [sp, rows, width]; padding rows are zero."""
    num_tokens, width = output.shape
    if num_tokens == sp_size * rows:
        return output.contiguous().view(sp_size, rows, width)
    send = output.new_zeros(sp_size * rows, width)
    send[:num_tokens].copy_(output)
    return send.view(sp_size, rows, width)


def unpack_output(received: torch.Tensor) -> torch.Tensor:
    """Received [sp, n, width], block s being the s-th part of the heads, as contiguous [n, sp * width]."""
    return received.transpose(0, 1).flatten(1)
