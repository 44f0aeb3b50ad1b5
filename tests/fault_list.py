"""The faults that :mod:`tests.faults` plants, and the tests that have to see them."""

from __future__ import annotations

from typing import NamedTuple

# What reviewers of GPU kernels have learnt to look for: each is planted at least once.
KINDS = (
    "off by one in a mask",
    "missing rescale",
    "swapped index",
    "wrong stride",
    "missing merge",
    "dropped tail",
    "half precision where float32 is due",
    "race",
    "int32 offset",
    "stale record",
    "unguarded value",
    "unchecked file",
)


class Tests(NamedTuple):
    """A selection of tests."""

    file: str  # from the root
    select: str  # the expression of -k


class Fault(NamedTuple):
    """One piece of source, what it becomes, and who has to notice."""

    name: str
    kind: str  # one of KINDS
    what: str  # is wrong then, for the table
    file: str  # below graphfuse/
    old: str  # stands there once
    new: str
    tests: Tests
    gpu: bool = False  # whether only a GPU can show it


def _select(file: str, select: str) -> Tests:
    return Tests(f"tests/{file}.py", select)


_SPMM = _select("ops/test_spmm", "test_widths and float32 and 33")
_SPMM_CUT = _select("ops/test_spmm", "cut_windows and hub and False")
_FAR = "kernels/test_run"
# lines that follow, where one alone would stand there twice
_SPMM_LOAD = " + offs_dim[None, :]\n        x = tl.load(x_ptr + offs_x, mask=mask_dim[None, :], other=0.0)"
_BACKWARD_MASK = "        gathered = live[:, None, None] & mask[None, :, :]\n        offs_gathered"

FAULTS = (
    Fault(
        "spmm-window-mask",
        "off by one in a mask",
        "the window kernel of `spmm` counts the last entry of a window twice",
        "kernels/tiles.py",
        "next_bits = load_bits(row_mask_ptr, begin, end, COLUMNS, SIZE)",
        "next_bits = load_bits(row_mask_ptr, begin, end + 1, COLUMNS, SIZE)",
        _SPMM,
    ),
    Fault(
        "attention-window-mask",
        "off by one in a mask",
        "attention's window kernels take a row mask of the next window",
        "kernels/tiles.py",
        "return tl.load(row_mask_ptr + offs, mask=offs < end, other=0)",
        "return tl.load(row_mask_ptr + offs, mask=offs <= end, other=0)",
        _select("ops/test_attention", "output_and_gradients and windows and ragged"),
    ),
    Fault(
        "attention-window-rescale",
        "missing rescale",
        "the online softmax of the window kernel keeps sums of an older maximum",
        "kernels/attention_windows.py",
        "total * rescale, acc * rescale",
        "total * rescale, acc",
        _select("ops/test_attention", "output_and_gradients and windows and hub"),
    ),
    Fault(
        "attention-row-rescale",
        "missing rescale",
        "the row kernel keeps a total of an older maximum",
        "kernels/attention_rows.py",
        "total = total * rescale + p\n",
        "total = total + p\n",
        _select("ops/test_attention", "output_and_gradients and rows and hub"),
    ),
    Fault(
        "gat-window-rescale",
        "missing rescale",
        "the tilt, of which GAT's gradient of receivers is made, is not rescaled",
        "kernels/gat_windows.py",
        "acc, tilt = acc * rescale, tilt * rescale",
        "acc, tilt = acc * rescale, tilt",
        _select("ops/test_head_groups", "test_any_group and 4-3-16-gat"),
    ),
    Fault(
        "attention-merge-rescale",
        "missing rescale",
        "slices of a long window or row are added as if their maxima were equal",
        "kernels/attention.py",
        "rescale, weight = tl.exp(top - shift), tl.exp(slice_top - shift)",
        "rescale, weight = tl.exp(top - shift), tl.exp(slice_top - shift_of(slice_top))",
        _select("ops/test_attention", "slices and hub and rows"),
    ),
    Fault(
        "sddmm-edge-order",
        "swapped index",
        "`sddmm` writes edges in the order of the record, not in the caller's",
        "kernels/sddmm.py",
        "tl.store(out_ptr + place, total",
        "tl.store(out_ptr + offs, total",
        _select("ops/test_sddmm", "output_and_gradients and ragged and float32"),
    ),
    Fault(
        "gatv2-receiver",
        "swapped index",
        "GATv2's backward takes the statistics of the source for those of the receiver",
        "kernels/gatv2_rows.py",
        "receiver = column[:, None].to(tl.int64) * HEADS + heads[None, :]",
        "receiver = (column[:, None] * 0 + row).to(tl.int64) * HEADS + heads[None, :]",
        _select("ops/test_additive_attention", "test_gatv2 and ragged"),
    ),
    Fault(
        "gat-heads-features",
        "swapped index",
        "a row of x is read as [features, heads]",
        "kernels/tiles.py",
        "return heads, heads[:, None] * DIM + offs_dim[None, :], mask",
        "return heads, offs_dim[None, :] * HEADS + heads[:, None], mask",
        _select("ops/test_additive_attention", "test_widths and gat-rows and 24"),
    ),
    Fault(
        "quick-build-transpose",
        "swapped index",
        "the quick build puts the row of the receiver into keys of the transpose",
        "formats/quick_kernels.py",
        "| (dst << 4) | (src & 15)",
        "| (dst << 4) | (dst & 15)",
        _select("formats/test_quick", "both_builds_agree and (ragged or bipartite)"),
    ),
    Fault(
        "attention-window-stride",
        "wrong stride",
        "the window kernel walks v in steps of k",
        "kernels/attention_windows.py",
        "gather(v_ptr, column, head, V_STRIDE,",
        "gather(v_ptr, column, head, K_STRIDE,",
        _select(_FAR, "2_31 and windows and sparse_attention"),
    ),
    Fault(
        "attention-backward-stride",
        "wrong stride",
        "the backward row kernel walks v, or the gradient, in steps of k or q",
        "kernels/attention_rows.py",
        "offs_gathered = offs_other * OTHER_VALUE_STRIDE + offs_head[None, :, :]",
        "offs_gathered = offs_other * OTHER_STRIDE + offs_head[None, :, :]",
        _select("ops/test_attention", "strided"),
    ),
    Fault(
        "spmm-last-slice",
        "missing merge",
        "the last slice of a long window or row is not added",
        "kernels/spmm.py",
        "for slot in tl.range(first, first + count, ",
        "for slot in tl.range(first, first + count - 1, ",
        _SPMM_CUT,
    ),
    Fault(
        "attention-backward-slice",
        "missing merge",
        "the gradient of a long window or row lacks its first slice",
        "kernels/attention_bwd.py",
        "for slot in tl.range(begin, begin + count, ",
        "for slot in tl.range(begin + 1, begin + count, ",
        _select("ops/test_attention", "slices and hub and windows"),
    ),
    Fault(
        "spmm-row-tail",
        "dropped tail",
        "the row kernel of `spmm` ends with the last full step of a row",
        "kernels/tiles.py",
        "for start in tl.range(begin, end, EDGES, num_stages=STAGES):",
        "for start in tl.range(begin, end - EDGES + 1, EDGES, num_stages=STAGES):",
        _SPMM,
    ),
    Fault(
        "gat-backward-tail",
        "dropped tail",
        "GAT's backward leaves out the last edge of a row",
        "kernels/additive_rows.py",
        "        listed_edge = live[:, None] & mask_head",
        "        live = offs < end - 1\n        listed_edge = live[:, None] & mask_head",
        _select("ops/test_additive_attention", "test_gat and rows and hub"),
    ),
    Fault(
        "spmm-window-bits",
        "half precision where float32 is due",
        "the window kernel drops the last 13 of the 24 bits of x",
        "kernels/tiles.py",
        'step = tl.dot(a, x - high, tl.zeros_like(acc), input_precision="tf32", out_dtype=ACC)',
        "step = tl.zeros_like(acc)",
        _SPMM,
    ),
    Fault(
        "attention-row-bits",
        "half precision where float32 is due",
        "keys are rounded to float16 before the scores are summed",
        "kernels/attention_rows.py",
        "s = sum_of_products(q[None, :, :] * k, live",
        "s = sum_of_products(q[None, :, :] * k.to(tl.float16).to(ACC), live",
        _select("ops/test_attention", "output_and_gradients and float32 and rows and ragged"),
    ),
    Fault(
        "dense-product-bits",
        "half precision where float32 is due",
        "products in float32 are those of operands in float16",
        "kernels/tiles.py",
        "return tl.dot(a, b, acc, input_precision=_FLOAT32, out_dtype=ACC)",
        "return tl.dot(a.to(tl.float16), b.to(tl.float16), acc, out_dtype=ACC)",
        _select("kernels/test_linear", "float32"),
    ),
    Fault(
        "slices-share-a-slot",
        "race",
        "two slices of a long window or row get one slot to write to",
        "formats/build.py",
        "slot = torch.where(is_slice, is_slice.cumsum(0) - 1, -1)",
        "slot = torch.where(is_slice, (is_slice.cumsum(0) - 1) // 2, -1)",
        _SPMM_CUT,
    ),
    Fault(
        "gate-shares-a-slot",
        "race",
        "two programs of the gate's backward write their sums to one place",
        "kernels/gate.py",
        "partial_ptr += pid.to(tl.int64) * (3 * DIM) + offs_dim",
        "partial_ptr += (pid // 2).to(tl.int64) * (3 * DIM) + offs_dim",
        _select("ops/test_gate", "slices_of_several_steps and float32 and 33"),
    ),
    Fault(
        "spmm-window-offset",
        "int32 offset",
        "the window kernel of `spmm` reads x with 32 bits",
        "kernels/tiles.py",
        "offs_x = column[:, None].to(tl.int64) * X_STRIDE" + _SPMM_LOAD,
        "offs_x = column[:, None] * X_STRIDE" + _SPMM_LOAD,
        _select(_FAR, "2_31 and spmm"),
    ),
    Fault(
        "sddmm-offset",
        "int32 offset",
        "`sddmm` reads b with 32 bits",
        "kernels/sddmm.py",
        "offs_b = column[:, None].to(tl.int64) * b_stride",
        "offs_b = column[:, None] * b_stride",
        _select(_FAR, "2_31 and sddmm"),
    ),
    Fault(
        "attention-backward-offset",
        "int32 offset",
        "the backward row kernel reads its gathered rows with 32 bits",
        "kernels/attention_rows.py",
        "offs_other = column[:, None, None].to(tl.int64)\n" + _BACKWARD_MASK,
        "offs_other = column[:, None, None]\n" + _BACKWARD_MASK,
        _select(_FAR, "2_31 and rows and sparse_attention"),
    ),
    Fault(
        "gather-offset",
        "int32 offset",
        "the window kernels of attention and GAT gather with 32 bits",
        "kernels/attention_tiles.py",
        "at = x_ptr + column.to(tl.int64)[:, None] * STRIDE",
        "at = x_ptr + column[:, None] * STRIDE",
        _select(_FAR, "2_31 and windows and attention"),
    ),
    Fault(
        "spmm-store-offset",
        "int32 offset",
        "`spmm` writes its result with 32 bits",
        "kernels/tiles.py",
        "mask_row = rows < num_rows\n    offs_row = rows.to(tl.int64)",
        "mask_row = rows < num_rows\n    offs_row = rows",
        _select("ops/test_real_graphs", "offsets_beyond_32_bits"),
        gpu=True,
    ),
    Fault(
        "edited-edges",
        "stale record",
        "the cache serves a record of what an `edge_index` was before an in-place edit",
        "formats/cache.py",
        " or known.state != state",
        "",
        _select("formats/test_cache", "in_place"),
    ),
    Fault(
        "reused-id",
        "stale record",
        "the cache serves the record of a dead tensor to one with its id",
        "formats/by_tensor.py",
        " and entry[0]() is tensor",
        "",
        _select("formats/test_cache", "used_again"),
    ),
    Fault(
        "spmm-nan-leak",
        "unguarded value",
        "a NaN in a node reaches all 16 rows of a window that names it",
        "kernels/tiles.py",
        "if not finite(acc):",
        "if tl.max(((acc * 0) != 0).to(tl.int32)) > 1:",
        _select("ops/test_spmm", "nan_and_inf"),
    ),
    Fault(
        "empty-row",
        "unguarded value",
        "a row without edges takes exp(-inf + inf)",
        "kernels/attention_tiles.py",
        'return tl.where(top == float("-inf"), 0.0, top)',
        "return top",
        _select("ops/test_attention", "rows_without_edges"),
    ),
    Fault(
        "dropped-copies",
        "swapped index",
        "backward drops the copies of a repeated edge together, forward one by one",
        "kernels/attention_bwd_windows.py",
        "other_key = of_copy(other_key, of_columns(copy, GROUP))",
        "other_key = of_copy(other_key, of_columns(copy * 0, GROUP))",
        _select("ops/test_attention", "test_dropout and repeated and windows"),
    ),
    Fault(
        "believed-file",
        "unchecked file",
        "the numbers of a file go to kernels as they are",
        "formats/save.py",
        'check_parts(parts, source.to(parts["windows"].device))',
        "pass",
        _select("formats/test_mutated_files", "every_number"),
    ),
    Fault(
        "attention-held",
        "unguarded value",
        "a window keeps sums against no maximum, whatever the scores",
        "kernels/attention_tiles.py",
        "good = ((total >= 2.0**-8) & (total <= 2.0**30)) | ((total == 0) & (some == 0))",
        "good = total == total",
        _select("ops/test_running_maximum", "that_needs_one"),
    ),
    Fault(
        "attention-seen",
        "unguarded value",
        "a row whose weights all vanished is taken for one without edges",
        "kernels/attention_windows.py",
        "seen |= bits.to(tl.int32)",
        "seen |= bits.to(tl.int32) * 0",
        _select("ops/test_running_maximum", "that_needs_one"),
    ),
    Fault(
        "logits-swapped",
        "swapped index",
        "both vectors of GAT's terms of nodes get the gradient of one",
        "kernels/logits.py",
        "tl.store(partial_ptr + HEADS * DIM + offs_att, of_right",
        "tl.store(partial_ptr + HEADS * DIM + offs_att, of_left",
        _select("ops/test_logits", "test_the_kernels and float32"),
    ),
    Fault(
        "reordered-rows",
        "swapped index",
        "windows in another order say that they hold the rows as numbered",
        "formats/build.py",
        "index_of(order)  #",
        "index_of(order.sort().values)  #",
        _select("formats/test_orders", "same_graph and ragged and degree"),
    ),
    Fault(
        "reordered-merge",
        "swapped index",
        "slices of a cut window, added up, go to the rows as numbered",
        "kernels/attention.py",
        "rows = rows_at(row_index_ptr, window * HEIGHT + inner)",
        "rows = window * HEIGHT + inner",
        _select("ops/test_reordered", "test_attention and late_hub"),
    ),
    Fault(
        "reordered-loops",
        "swapped index",
        "attention with a loop for each node counts the loops of a reordered window twice",
        "formats/walk.py",
        "return masks_without_loops(w), 2",
        "return w.row_mask, 2",
        _select("ops/test_reordered", "test_gat and repeated"),
    ),
    Fault(
        "written-matrix",
        "stale record",
        "sparse features whose indices were written to keep the record of the old ones",
        "formats/cache.py",
        "same = known is not None and known.state == state",
        "same = True",
        _select("nn/test_sparse_features", "until_they_are_stale"),
    ),
)
