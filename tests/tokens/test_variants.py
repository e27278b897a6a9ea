"""However many template options agents think of, few renderers are kept."""

from __future__ import annotations

from headrace.tokens.renderer import MAX_VARIANTS, RendererVariants


def test_the_same_options_are_the_same_renderer_in_any_order() -> None:
    variants: RendererVariants[object] = RendererVariants()
    assert variants.get({"a": 1, "b": 2}, object) is variants.get({"b": 2, "a": 1}, object)


def test_the_ones_used_last_are_kept() -> None:
    variants: RendererVariants[object] = RendererVariants()
    first = variants.get({"n": 0}, object)
    for n in range(1, 3 * MAX_VARIANTS):
        variants.get({"n": n}, object)
        assert variants.get({"n": 0}, object) is first
        assert len(variants) <= MAX_VARIANTS
    assert variants.get({"n": 3 * MAX_VARIANTS - 1}, list) != []
    assert variants.get({"n": 1}, list) == []
