"""What environments and trainers say to the Trajectory API, and what the original answers, by the contract."""

from __future__ import annotations

from collections.abc import Iterator

from tests.atropos import batching, registering, standing, wire
from tests.atropos.calls import Scenario
from tests.atropos.words import NOT_NUMBERS


def _all() -> Iterator[Scenario]:
    for one in (
        registering.before_anybody_registered,
        registering.trainer_then_environments,
        registering.the_same_trainer_again,
        registering.another_trainer,
        registering.a_trainer_that_resumes,
        registering.required_fields,
        registering.lenient_registrations,
        registering.data_before_the_trainer,
        registering.a_negative_environment,
        registering.reset,
        registering.a_batch_after_a_reset,
        registering.reset_by_post,
        batching.equal_groups_are_two,
        batching.a_retry_with_a_key,
        batching.a_batch_when_there_is_one,
        batching.two_batches_at_once,
        batching.mixed_sizes,
        batching.sizes_that_do_not_divide,
        batching.a_group_larger_than_the_batch,
        batching.odd_sizes_wait_in_a_buffer,
        batching.any_combination_of_a_buffer,
        batching.buffered_groups_are_served,
        batching.buffers_are_each_environments_own,
        batching.lists_of_groups,
        batching.a_minimum_for_one_of_two,
        batching.shares_over_one,
        batching.a_share_ends_with_its_environment,
        batching.a_minimum_and_no_data,
        batching.minimum_with_other_sizes,
        standing.weights,
        standing.what_others_queued_counts,
        standing.groups_of_one_leave_the_others_out,
        standing.status_raises_the_group_size,
        standing.nobody_is_connected,
        standing.no_weight_at_all,
        standing.unknown_environments,
        wire.every_field,
        wire.lenient_numbers,
        wire.digits,
        wire.large_integers,
        wire.unequal_lengths,
        wire.gzip_both_ways,
        wire.gzip_from_a_thousand_bytes,
        wire.a_page_of_another_origin,
    ):
        yield Scenario(one.__name__, tuple(one()))
    for size in range(1, 9):
        yield Scenario(f"groups_of_{size}", tuple(batching.groups_of(size)))
    for text in NOT_NUMBERS:
        yield Scenario(f"not_a_number_{text}", tuple(wire.not_a_number(text)))


SCENARIOS = tuple(_all())
