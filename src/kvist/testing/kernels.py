"""The contract of a kernel set: what every backend must do, on generated cases.

Owns the checks. Subclass `KernelContract`, say how to select the backend, and pytest runs all of
them against `kvist.kernels.reference`. Knows no backend by name. Needs pytest.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvist.kernels import reference
from kvist.kernels.batch import AttentionBatch
from kvist.testing.kernel_cases import (
    CASES,
    EDGES,
    HOLES,
    LAYER,
    LAYERS,
    OPTIONS,
    KernelCase,
    Scene,
)
from kvist.testing.prepared_steps import TOLERANCE, PreparedStepContract, same_bytes


class KernelContract(PreparedStepContract):
    """Subclass it, set what differs, and name the subclass ``Test...``.

    Attributes
    ----------
    device : torch.device
        Where the pools of the tests are.
    bitwise : bool
        Whether a decode is bitwise the same in any batch. If not, it is held to the tolerance.
    """

    bitwise = True

    @pytest.mark.parametrize("name", CASES)
    def test_attention_is_the_references(self, name: str) -> None:
        """Decode, prefill from zero and prefill over a prefix, in one batch; NaN all around."""
        scene = Scene(CASES[name], self.device)
        rtol, atol = TOLERANCE[scene.case.dtype]
        out = scene.attend(self.select(scene.case), scene.batch, scene.query)
        assert out.dtype == scene.case.dtype
        torch.testing.assert_close(out.float(), scene.expected()[0], rtol=rtol, atol=atol)

    @pytest.mark.parametrize("name", [*EDGES, *OPTIONS, "seed 1", "seed 2", "seed 3"])
    def test_log_sum_exp_is_the_references(self, name: str) -> None:
        """By it, parts of a context are merged: a wrong one only shows in the merge."""
        scene = Scene(CASES[name], self.device)
        case = scene.case
        answer = self.select(case).attention(
            scene.query,
            scene.pool,
            case.layout,
            LAYER,
            scene.batch,
            case.scale,
            return_lse=True,
            options=scene.options,
        )
        assert isinstance(answer, tuple)
        out, lse = answer
        expected, expected_lse = scene.expected()
        rtol, atol = TOLERANCE[case.dtype]
        torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("name", [*EDGES, *OPTIONS, "seed 4", "seed 5", "seed 6"])
    def test_what_unwritten_slots_hold_does_not_matter(self, name: str) -> None:
        """A stale or never written slot must not reach a result by a single bit."""
        case = CASES[name]
        poisoned, clean = Scene(case, self.device), Scene(case, self.device, unwritten=0.0)
        kernels = self.select(case)
        first = poisoned.attend(kernels, poisoned.batch, poisoned.query)
        second = clean.attend(kernels, clean.batch, clean.query)
        assert same_bytes(first, second)

    @pytest.mark.parametrize("name", [*EDGES, "seed 7", "seed 8", "seed 9"])
    def test_where_blocks_lie_does_not_matter(self, name: str) -> None:
        """The same tokens in other blocks give the same bits: preemption and reuse stay exact."""
        case = CASES[name]
        here, there = Scene(case, self.device), Scene(case, self.device, placement=1)
        assert here.tables != there.tables
        kernels = self.select(case)
        first = here.attend(kernels, here.batch, here.query)
        assert same_bytes(first, there.attend(kernels, there.batch, there.query))

    @pytest.mark.parametrize("name", HOLES)
    def test_contexts_with_holes(self, name: str) -> None:
        """Runs of slots in place of tables; what lies between them is never seen."""
        scene = Scene(HOLES[name], self.device)
        batch, _ = scene.with_holes()
        rtol, atol = TOLERANCE[scene.case.dtype]
        out = scene.attend(self.select(scene.case), batch, scene.query)
        torch.testing.assert_close(out.float(), scene.expected(batch)[0], rtol=rtol, atol=atol)

    def test_a_context_that_is_one_hole(self) -> None:
        """Nothing to attend to: zeros and minus infinity, so that a merge ignores the part."""
        scene = Scene(KernelCase((1, 2), (40, 30)), self.device)
        case = scene.case
        batch = AttentionBatch.of_runs([1, 2], [40, 30], [[], []], case.block_size, self.device)
        answer = self.select(case).attention(
            scene.query, scene.pool, case.layout, LAYER, batch, case.scale, return_lse=True
        )
        assert isinstance(answer, tuple)
        assert not answer[0].any()
        assert bool((answer[1] == float("-inf")).all())

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("rotary", [64, 20])
    def test_a_rotating_write_is_the_references(self, dtype: torch.dtype, rotary: int) -> None:
        """Queries in place, keys on their way; the key tensor itself stays as it is."""
        scene = Scene(KernelCase((40,), (40,), dtype=dtype), self.device)
        case, slots = scene.case, scene.slots(0)
        angles = torch.randn(40, rotary // 2, device=self.device).repeat(1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        results = []
        for rotate_write_kv in (
            reference.rotate_write_kv,
            self.select(case).rotate_write_kv,
        ):
            pool = torch.zeros_like(scene.pool)
            # Query, key and value as parts of one projection.
            parts = [scene.query.flatten(1), scene.keys[0].flatten(1), scene.values[0].flatten(1)]
            fused = torch.cat(parts, 1)
            rows = fused.view(40, -1, case.key_dim)
            query, heads = rows[:, : case.num_query_heads], rows[:, case.num_query_heads :]
            key, value = heads[:, : case.num_kv_heads], heads[:, case.num_kv_heads :]
            rotate_write_kv(pool, case.layout, LAYER, query, key, value, slots, cos, sin)
            results.append((pool, fused))
        rtol, atol = TOLERANCE[dtype]
        for wanted, got in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)
        with pytest.raises(ValueError, match=r"\b63\b|\b21\b|even"):
            self.select(case).rotate_write_kv(
                results[0][0],
                case.layout,
                LAYER,
                scene.query,
                scene.keys[0],
                scene.values[0],
                slots,
                cos[:, :-1],
                sin[:, :-1],
            )

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_a_decode_does_not_depend_on_its_batch(self, dtype: torch.dtype) -> None:
        """Alone, among others, and in another order."""
        case = KernelCase((1,) * 6, (1, 17, 130, 512, 700, 1300), dtype=dtype)
        scene = Scene(case, self.device)
        kernels = self.select(case)
        together = scene.attend(kernels, scene.batch, scene.query)
        back = list(range(6))[::-1]
        reversed_ = scene.attend(kernels, scene.batch_of(back), scene.query[back])[back]
        alone = torch.cat(
            [scene.attend(kernels, scene.batch_of([r]), scene.query[r : r + 1]) for r in range(6)]
        )
        rtol, atol = TOLERANCE[dtype]
        for other in (reversed_, alone):
            if self.bitwise:
                assert same_bytes(together, other)
            else:
                torch.testing.assert_close(together, other, rtol=rtol, atol=atol)

    def test_strided_queries(self) -> None:
        """A query is a slice of a fused projection, or heads and tokens transposed."""
        scene = Scene(KernelCase((1, 1, 6), (50, 9, 30)), self.device)
        kernels, tokens = self.select(scene.case), scene.query.shape[0]
        plain = scene.attend(kernels, scene.batch, scene.query)
        turned = scene.query.transpose(0, 1).contiguous().transpose(0, 1)
        wide = torch.cat([scene.query.flatten(1), scene.query.flatten(1)], 1)
        sliced = wide[:, scene.query[0].numel() :].view(tokens, *scene.query.shape[1:])
        for query in (turned, sliced):
            assert not query.is_contiguous()
            torch.testing.assert_close(scene.attend(kernels, scene.batch, query), plain)

    @pytest.mark.parametrize("name", [*EDGES, *(f"seed {seed}" for seed in range(8))])
    def test_write_changes_its_slots_and_nothing_else(self, name: str) -> None:
        """The packing, element by element; other layers, heads and blocks are compared too."""
        scene = Scene(CASES[name], self.device)
        case = scene.case
        ours = torch.randn(scene.pool.shape, device=self.device).to(case.dtype)
        theirs = ours.clone()
        kernels = self.select(case)
        layout, heads, slots_a_block = case.layout, case.num_kv_heads, range(case.block_size)
        key_at, value_at = (
            torch.tensor(
                [
                    [
                        [index(LAYER, head, slot, dim) for dim in range(dims)]
                        for slot in slots_a_block
                    ]
                    for head in range(heads)
                ],
                device=self.device,
            )
            for index, dims in (
                (layout.key_index, case.key_dim),
                (layout.value_index, case.value_dim),
            )
        )
        for sequence, (key, value) in enumerate(zip(scene.keys, scene.values, strict=True)):
            # K as the engine has it, [H, T, D] turned; V a slice of something wider.
            turned = key.transpose(0, 1).contiguous().transpose(0, 1)
            sliced = torch.cat([value, value], -1)[..., case.value_dim :]
            slots = scene.slots(sequence)
            kernels.write_kv(ours, case.layout, LAYER, turned, sliced, slots)
            for token, place in enumerate(slots.tolist()):
                block, slot = divmod(place, case.block_size)
                for head in range(case.num_kv_heads):
                    theirs[block, key_at[head][slot]] = key[token, head]
                    theirs[block, value_at[head][slot]] = value[token, head]
        assert same_bytes(ours, theirs)

    def test_a_refused_write_changes_nothing(self) -> None:
        """Shapes that disagree, and a slot outside the pool."""
        scene = Scene(KernelCase((4,), (20,)), self.device)
        case, kernels = scene.case, self.select(scene.case)
        before = scene.pool.clone()
        key, value, slots = scene.keys[0], scene.values[0], scene.slots(0)
        with pytest.raises(ValueError, match=r"\b19\b"):
            kernels.write_kv(scene.pool, case.layout, LAYER, key[:19], value, slots)
        with pytest.raises(ValueError, match=r"value|pool"):
            kernels.write_kv(scene.pool, case.layout, LAYER, key, value[..., :8], slots)
        with pytest.raises(IndexError, match=r"\b3\b"):
            kernels.write_kv(scene.pool, case.layout, LAYERS, key, value, slots)
        if self.device.type == "cpu":
            total = scene.pool.shape[0] * case.block_size
            for outside in (-1, total):
                slots[7] = outside
                with pytest.raises(IndexError, match=str(outside)):
                    kernels.write_kv(scene.pool, case.layout, LAYER, key, value, slots)
        assert same_bytes(scene.pool, before)

    def test_a_write_casts_to_the_pool(self) -> None:
        """K and V of a model that computes wider or narrower than it stores."""
        scene = Scene(KernelCase((4,), (20,), dtype=torch.bfloat16), self.device)
        case, slots = scene.case, scene.slots(0)
        pools = [torch.zeros_like(scene.pool) for _ in range(2)]
        key, value = scene.keys[0].float() * 1.001, scene.values[0].float() * 1.001
        kernels = self.select(case)
        kernels.write_kv(pools[0], case.layout, LAYER, key, value, slots)
        kernels.write_kv(pools[1], case.layout, LAYER, key.bfloat16(), value.bfloat16(), slots)
        assert same_bytes(*pools)
        # And a query wider than the pool, whose result is as wide.
        out = scene.attend(kernels, scene.batch, scene.query.float())
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, scene.expected()[0], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_copy_moves_whole_blocks(self, dtype: torch.dtype) -> None:
        """All layers, and no block that was not named; one source may feed two copies."""
        case = KernelCase((4,), (20,), dtype=dtype)
        pool = torch.randn(9, case.layout.block_elements, device=self.device).to(dtype)
        before, wanted = pool.clone(), pool.clone()
        src, dst = (torch.tensor(ids, device=self.device) for ids in ([0, 8, 8], [3, 1, 5]))
        kernels = self.select(case)
        kernels.copy_blocks(pool, src, dst)
        wanted[3], wanted[1], wanted[5] = before[0], before[8], before[8]
        assert same_bytes(pool, wanted)
        kernels.copy_blocks(pool, src[:0], dst[:0])
        assert same_bytes(pool, wanted)

    @pytest.mark.parametrize(
        ("src", "dst", "error"),
        [
            ([0, 1], [2, 2], ValueError),
            ([0, 1], [2, 0], ValueError),
            ([0], [0], ValueError),
            ([0, 1], [2], ValueError),
            ([9], [0], IndexError),
            ([0], [-1], IndexError),
        ],
    )
    def test_a_refused_copy_changes_nothing(
        self, src: list[int], dst: list[int], error: type[Exception]
    ) -> None:
        """Twice written, both read and written, unequal lengths, outside the pool."""
        case = KernelCase((4,), (20,))
        pool = torch.randn(9, case.layout.block_elements, device=self.device)
        before = pool.clone()
        with pytest.raises(error):
            self.select(case).copy_blocks(
                pool,
                torch.tensor(src, device=self.device),
                torch.tensor(dst, device=self.device),
            )
        assert same_bytes(pool, before)

    def test_what_does_not_fit_together_is_refused(self) -> None:
        """A query of other size than the batch or layout; a pool of another layout."""
        scene = Scene(KernelCase((1, 6), (50, 30)), self.device)
        case, kernels, query, batch = scene.case, self.select(scene.case), scene.query, scene.batch
        for wrong in (query[:-1], query[..., :-1], query[:, :-1]):
            with pytest.raises(ValueError, match="query"):
                scene.attend(kernels, batch, wrong)
        other = replace(case, block_size=8).layout
        with pytest.raises(ValueError, match="block_size"):
            kernels.attention(query, scene.pool, other, LAYER, batch, case.scale)
        with pytest.raises(ValueError, match="pool"):
            kernels.attention(query, scene.pool[:, 1:], case.layout, LAYER, batch, case.scale)
        with pytest.raises(IndexError):
            kernels.attention(query, scene.pool, case.layout, LAYERS, batch, case.scale)
