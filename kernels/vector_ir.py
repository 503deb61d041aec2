"""Vectors of fixed width in LLVM IR, for numba intrinsics whose loops must not depend on auto-vectorisation.

Everything is expressed in LLVM's portable vector types and operations; LLVM picks the machine's instructions
(AVX2, AVX-512, NEON). Knows nothing of what is computed.
Source: the LLVM language reference (llvm.org/docs/LangRef.html), numba's `extending.intrinsic`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

Value = Any

__all__ = ["F16", "F32", "HAS_AVX2", "HAS_AVX512", "I8", "I16", "I32", "I64", "VectorBuilder", "ir"]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

# AVX-512 has 32 vector registers, AVX2 and most others 16 that matter here.
HAS_AVX512 = get_host_cpu_features().get("avx512bw", False)
HAS_AVX2 = get_host_cpu_features().get("avx2", False)


class VectorBuilder:
    """Vector operations on top of an llvmlite IRBuilder; addresses are i64 values."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.ir = builder

    def integer(self, value: int) -> Value:
        """An i64 constant."""
        return ir.Constant(I64, value)

    def constant(self, type_: ir.Type, value: float, lanes: int) -> Value:
        """A vector with `value` in every lane."""
        return ir.Constant(ir.VectorType(type_, lanes), [value] * lanes)

    def offset(self, address: Value, num_bytes: int) -> Value:
        """address + num_bytes."""
        return self.ir.add(address, self.integer(num_bytes)) if num_bytes else address

    def at(self, base: Value, index: Value, num_bytes: int | Value) -> Value:
        """base + index * num_bytes."""
        size = self.integer(num_bytes) if isinstance(num_bytes, int) else num_bytes
        return self.ir.add(base, self.ir.mul(index, size))

    def load(self, address: Value, type_: ir.Type, lanes: int | None = None) -> Value:
        """A scalar, or a vector of `lanes`, from an address aligned to one element."""
        whole = type_ if lanes is None else ir.VectorType(type_, lanes)
        value = self.ir.load(self.ir.inttoptr(address, whole.as_pointer()))
        value.align = _element_bytes(type_)
        return value

    def store(self, value: Value, address: Value) -> None:
        """Store a scalar or a vector to an address aligned to one element."""
        element = value.type.element if isinstance(value.type, ir.VectorType) else value.type
        store = self.ir.store(value, self.ir.inttoptr(address, value.type.as_pointer()))
        store.align = _element_bytes(element)

    def prefetch(self, address: Value) -> None:
        """Ask for the cache line at an address that will be read soon."""
        pointer = I8.as_pointer()
        declaration = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.ir.module, declaration, "llvm.prefetch.p0")
        # For reading, into the second cache, as data.
        hints = [ir.Constant(I32, hint) for hint in (0, 2, 1)]
        self.ir.call(function, [self.ir.inttoptr(address, pointer), *hints])

    def splat(self, scalar: Value, lanes: int) -> Value:
        """A vector with the scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.ir.insert_element(undefined, scalar, ir.Constant(I32, 0))
        return self.ir.shuffle_vector(first, undefined, self._mask([0] * lanes))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self._call("fma", a.type, [a, b, c])

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger of two, lane by lane; neither may be NaN."""
        return self.ir.select(self.ir.fcmp_ordered(">", a, b), a, b)

    def call_unary(self, name: str, a: Value) -> Value:
        """LLVM's `name` intrinsic ("fabs", "rint") of a float vector."""
        return self._call(name, a.type, [a])

    def reduce(self, a: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Combine all lanes (a power of two of them) into a scalar, halves first."""
        lanes = a.type.count
        while lanes > 1:
            lanes //= 2
            low = self.ir.shuffle_vector(a, a, self._mask(range(lanes)))
            high = self.ir.shuffle_vector(a, a, self._mask(range(lanes, 2 * lanes)))
            a = combine(low, high)
        return self.ir.extract_element(a, ir.Constant(I32, 0))

    def concatenate(self, a: Value, b: Value) -> Value:
        """Lanes of a, then of b."""
        return self.ir.shuffle_vector(a, b, self._mask(range(2 * a.type.count)))

    def spread(self, a: Value, lane: int) -> Value:
        """A vector with lane `lane` of a in every lane."""
        return self.ir.shuffle_vector(a, a, self._mask([lane] * a.type.count))

    def add_pairs(self, a: Value, b: Value) -> Value:
        """Sums of neighbours of two vectors of 8, in the order of vhaddps: four lanes of a, b, a, b each two."""
        even = self.ir.shuffle_vector(a, b, self._mask([0, 2, 8, 10, 4, 6, 12, 14]))
        odd = self.ir.shuffle_vector(a, b, self._mask([1, 3, 9, 11, 5, 7, 13, 15]))
        return self.ir.fadd(even, odd)

    def add_halves(self, a: Value, b: Value) -> Value:
        """Lower plus upper four lanes of a, then those of b."""
        low = self.ir.shuffle_vector(a, b, self._mask([0, 1, 2, 3, 8, 9, 10, 11]))
        high = self.ir.shuffle_vector(a, b, self._mask([4, 5, 6, 7, 12, 13, 14, 15]))
        return self.ir.fadd(low, high)

    def pair_dot(self, a: Value, b: Value) -> Value:
        """Two vectors of 2n int16 -> n int32: a[2i] * b[2i] + a[2i+1] * b[2i+1].

        LLVM recognises this form as vpmaddwd, and together with an addition as vpdpwssd where there is VNNI.
        """
        lanes = a.type.count
        wide = ir.VectorType(I32, lanes)
        product = self.ir.mul(self.ir.sext(a, wide), self.ir.sext(b, wide))
        even = self.ir.shuffle_vector(product, product, self._mask(range(0, lanes, 2)))
        odd = self.ir.shuffle_vector(product, product, self._mask(range(1, lanes, 2)))
        return self.ir.add(even, odd)

    def exp(self, x: Value) -> Value:
        """e^x of float32 lanes, relative error below 2e-7; x is clamped to [-80, 88].

        Products with e^-80 are still normal numbers; denormal ones would be slow.

        Cody-Waite reduction to |r| <= ln(2) / 2 and the degree-6 polynomial of the Cephes library's expf.
        """
        lanes = x.type.count

        def const(value: float) -> Value:
            return self.constant(F32, value, lanes)

        x = self.maximum(x, const(-80.0))
        x = self.ir.select(self.ir.fcmp_ordered("<", x, const(88.0)), x, const(88.0))
        n = self.call_unary("rint", self.ir.fmul(x, const(math.log2(math.e))))
        r = self.fma(n, const(-0.693359375), x)
        r = self.fma(n, const(2.12194440e-4), r)
        y = const(1.9875691500e-4)
        for coefficient in (
            1.3981999507e-3,
            8.3334519073e-3,
            4.1665795894e-2,
            1.6666665459e-1,
            5.0000001201e-1,
        ):
            y = self.fma(y, r, const(coefficient))
        y = self.ir.fadd(self.fma(self.ir.fmul(r, r), y, r), const(1.0))
        exponent = self.ir.shl(
            self.ir.fptosi(n, ir.VectorType(I32, lanes)), ir.Constant(ir.VectorType(I32, lanes), [23] * lanes)
        )
        bits = self.ir.add(self.ir.bitcast(y, ir.VectorType(I32, lanes)), exponent)
        return self.ir.bitcast(bits, x.type)

    def tanh(self, x: Value) -> Value:
        """tanh of float32 lanes, absolute error below 1e-6: 1 - 2 / (e^2x + 1)."""
        one, two = (self.constant(F32, value, x.type.count) for value in (1.0, 2.0))
        grown = self.exp(self.ir.fmul(x, two))
        return self.ir.fsub(one, self.ir.fdiv(two, self.ir.fadd(grown, one)))

    def loop(
        self, count: Value, initial: Sequence[Value], body: Callable[[Value, list[Value]], list[Value]]
    ) -> list[Value]:
        """Run body(index, carried) `count` times (at least once) and return the values carried at the end."""
        before = self.ir.block
        start, end = self.ir.append_basic_block("loop"), self.ir.append_basic_block("done")
        self.ir.branch(start)
        self.ir.position_at_end(start)
        index = self.ir.phi(I64)
        index.add_incoming(self.integer(0), before)
        carried = [self.ir.phi(value.type) for value in initial]
        for phi, value in zip(carried, initial, strict=True):
            phi.add_incoming(value, before)
        results = body(index, carried)
        following = self.ir.add(index, self.integer(1))
        index.add_incoming(following, self.ir.block)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value, self.ir.block)
        self.ir.cbranch(self.ir.icmp_signed("<", following, count), start, end)
        self.ir.position_at_end(end)
        return results

    def _mask(self, lanes: Sequence[int]) -> Value:
        return ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))

    def _call(self, name: str, type_: ir.VectorType, arguments: list[Value]) -> Value:
        declaration = ir.FunctionType(type_, [type_] * len(arguments))
        function = cgutils.get_or_insert_function(self.ir.module, declaration, f"llvm.{name}.v{type_.count}f32")
        return self.ir.call(function, arguments)


def _element_bytes(type_: ir.Type) -> int:
    if isinstance(type_, ir.IntType):
        return type_.width // 8
    return 2 if isinstance(type_, ir.HalfType) else 4
