"""The gradient of the matrix task in one pass over the samples, compiled at its first use.

If a gradient has few matrix rows, the matrix products of torch are slow. The two products must each
read all samples from memory, and the softmax between the products takes a dozen Python calls. In
this module, a block of samples stays in the processor's cache for the logits, the softmax and the
gradient. numba compiles the code in a few seconds. The compiled code is stored next to this file or
in the user's cache. Sums may be added in another order, as in any matrix product. NaN and infinity
are preserved.
"""

import math
from typing import Any

import numba
import numpy as np

BLOCK = 64  # number of samples that are in the cache at the same time
FAST = {"reassoc", "contract", "nsz"}


def _compiled(function: Any) -> Any:
    return numba.njit(nogil=True, cache=True, fastmath=FAST, error_model="numpy")(function)


@_compiled
def slope_sums(
    inputs: np.ndarray,
    labels: np.ndarray,
    weight: np.ndarray,
    skip: np.ndarray,
    share: float,
    total: np.ndarray,
    right: np.ndarray,
) -> bool:
    """Add `share` times the sum of gradients of the loss to `total`, and the sum of p_y to `right`.

    Args:
        inputs: Samples [n, d].
        labels: Labels [n] from 0 to c - 1.
        weight: Parameters [S, c, d].
        skip: For each replica [S], the number of the sample that the replica leaves out. -1 means
            that no sample is left out.
        share: Factor of the gradients.
        total: Sum of gradients [S, c, d], changed in place.
        right: Sum [S] of the probabilities p_y of the labels, changed in place. The loss of a
            sample is 1 - p_y.

    Returns:
        Whether the sums were computed. If a label is not in the range from 0 to c - 1, the result
        is False and no array is changed.
    """
    replicas, classes, dimension = weight.shape
    smallest, largest = 0, 0
    for label in labels:
        smallest, largest = min(smallest, label), max(largest, label)
    if smallest < 0 or largest >= classes:
        return False
    logits = np.empty((replicas, classes, BLOCK), inputs.dtype)
    flat = logits.reshape(replicas * classes, BLOCK)
    weights = weight.reshape(replicas * classes, dimension)
    totals = total.reshape(replicas * classes, dimension)
    for start in range(0, len(inputs), BLOCK):
        rows = inputs[start : start + BLOCK]
        _products(rows, weights, flat)
        _slopes(logits, labels[start : start + BLOCK], skip - start, share, right)
        _add_products(rows, flat, totals)
    return True


@_compiled
def _products(rows: np.ndarray, weights: np.ndarray, out: np.ndarray) -> None:
    """Compute out[k, i] = <weights_k, rows_i>, for four rows and five weights at a time."""
    n, dimension, zero = rows.shape[0], rows.shape[1], rows.dtype.type(0)
    fives, fours = len(weights) // 5 * 5, n // 4 * 4
    for i in range(0, fours, 4):
        p, q, r, s = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        for k in range(0, fives, 5):
            v, w, x = weights[k], weights[k + 1], weights[k + 2]
            y, z = weights[k + 3], weights[k + 4]
            pv = pw = px = py = pz = qv = qw = qx = qy = qz = zero
            rv = rw = rx = ry = rz = sv = sw = sx = sy = sz = zero
            for j in range(dimension):
                a, b, c, d = p[j], q[j], r[j], s[j]
                m = v[j]
                pv += a * m
                qv += b * m
                rv += c * m
                sv += d * m
                m = w[j]
                pw += a * m
                qw += b * m
                rw += c * m
                sw += d * m
                m = x[j]
                px += a * m
                qx += b * m
                rx += c * m
                sx += d * m
                m = y[j]
                py += a * m
                qy += b * m
                ry += c * m
                sy += d * m
                m = z[j]
                pz += a * m
                qz += b * m
                rz += c * m
                sz += d * m
            out[k, i], out[k, i + 1], out[k, i + 2], out[k, i + 3] = pv, qv, rv, sv
            out[k + 1, i], out[k + 1, i + 1], out[k + 1, i + 2], out[k + 1, i + 3] = pw, qw, rw, sw
            out[k + 2, i], out[k + 2, i + 1], out[k + 2, i + 2], out[k + 2, i + 3] = px, qx, rx, sx
            out[k + 3, i], out[k + 3, i + 1], out[k + 3, i + 2], out[k + 3, i + 3] = py, qy, ry, sy
            out[k + 4, i], out[k + 4, i + 1], out[k + 4, i + 2], out[k + 4, i + 3] = pz, qz, rz, sz
    for k in range(len(weights)):
        w = weights[k]
        for i in range(fours if k < fives else 0, n):
            u, product = rows[i], zero
            for j in range(dimension):
                product += u[j] * w[j]
            out[k, i] = product


@_compiled
def _slopes(
    logits: np.ndarray, labels: np.ndarray, skip: np.ndarray, share: float, right: np.ndarray
) -> None:
    """Overwrite the logits [S, c, n] with slopes, and add the sums of p_y to `right` [S].

    The slope of a sample is share (p_y p - p_y e_y), where p contains the predicted probabilities
    and y is the label. The slope of the sample skip[s] in replica s is 0.
    """
    n = len(labels)
    peak, sums, p_label = np.empty((3, n), logits.dtype)
    for s in range(len(logits)):
        slopes = logits[s]
        _exponentials(slopes, peak, sums)
        for i in range(n):
            p_label[i] = slopes[labels[i], i] / sums[i]
        if 0 <= skip[s] < n:
            p_label[skip[s]] *= 0  # NaN stays NaN, because the mean has included it
        for i in range(n):
            right[s] += p_label[i]
            sums[i] = p_label[i] * share / sums[i]
        for k in range(slopes.shape[0]):
            for i in range(n):
                slopes[k, i] *= sums[i]
        _subtract(slopes, labels, p_label, share)
        if 0 <= skip[s] < n:
            slopes[:, skip[s]] = 0


@_compiled
def _subtract(slopes: np.ndarray, labels: np.ndarray, p_label: np.ndarray, share: float) -> None:
    for i in range(len(labels)):
        slopes[labels[i], i] -= p_label[i] * share


@_compiled
def _exponentials(logits: np.ndarray, peak: np.ndarray, sums: np.ndarray) -> None:
    """Replace the logits by exp(logits - maximum) in place, and store the sums over the classes."""
    n = len(sums)
    for i in range(n):
        peak[i], sums[i] = logits[0, i], 0
    for k in range(1, logits.shape[0]):
        for i in range(n):
            peak[i] = max(peak[i], logits[k, i])
    for k in range(logits.shape[0]):
        for i in range(n):
            logits[k, i] = math.exp(logits[k, i] - peak[i])
            sums[i] += logits[k, i]


@_compiled
def _add_products(rows: np.ndarray, slopes: np.ndarray, totals: np.ndarray) -> None:
    """Multiply row i by slopes[k, i] for all i and k, and add the results to totals[k].

    Four rows are processed at a time.
    """
    n, dimension = rows.shape
    fives, fours = len(totals) // 5 * 5, n // 4 * 4
    _add_fives(rows, slopes, totals)
    for i in range(0, fours, 4):
        p, q, r, s = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
        for k in range(fives, len(totals)):
            m, v = slopes[k], totals[k]
            a, b, c, d = m[i], m[i + 1], m[i + 2], m[i + 3]
            for j in range(dimension):
                v[j] += a * p[j] + b * q[j] + c * r[j] + d * s[j]
    for i in range(fours, n):
        u = rows[i]
        for k in range(len(totals)):
            v, a = totals[k], slopes[k, i]
            for j in range(dimension):
                v[j] += a * u[j]


@_compiled
def _add_fives(rows: np.ndarray, slopes: np.ndarray, totals: np.ndarray) -> None:
    """Do the part of `_add_products` with complete groups of five sums and four rows.

    Five sums fit into the innermost cache of the processor. An entry of a sum is written only once
    for the products of four rows.
    """
    n, dimension = rows.shape
    fives, fours = len(totals) // 5 * 5, n // 4 * 4
    for k in range(0, fives, 5):
        v, w, x = totals[k], totals[k + 1], totals[k + 2]
        y, z = totals[k + 3], totals[k + 4]
        for i in range(0, fours, 4):
            p, q, r, s = rows[i], rows[i + 1], rows[i + 2], rows[i + 3]
            m = slopes[k]
            pv, qv, rv, sv = m[i], m[i + 1], m[i + 2], m[i + 3]
            m = slopes[k + 1]
            pw, qw, rw, sw = m[i], m[i + 1], m[i + 2], m[i + 3]
            m = slopes[k + 2]
            px, qx, rx, sx = m[i], m[i + 1], m[i + 2], m[i + 3]
            m = slopes[k + 3]
            py, qy, ry, sy = m[i], m[i + 1], m[i + 2], m[i + 3]
            m = slopes[k + 4]
            pz, qz, rz, sz = m[i], m[i + 1], m[i + 2], m[i + 3]
            for j in range(dimension):
                a, b, c, d = p[j], q[j], r[j], s[j]
                v[j] += pv * a + qv * b + rv * c + sv * d
                w[j] += pw * a + qw * b + rw * c + sw * d
                x[j] += px * a + qx * b + rx * c + sx * d
                y[j] += py * a + qy * b + ry * c + sy * d
                z[j] += pz * a + qz * b + rz * c + sz * d
