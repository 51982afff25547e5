"""For each hazard what a person would see: functions that return whether training came out right.

Each is run with the hazard on, once with its guard and once without. They are given an empty folder of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.layer.guards import resume_loops
from tests.layer.guards.experiments import (
    activations,
    failures,
    memory,
    order,
    products,
    results,
    resumed,
    several,
    shapes,
    silent,
    sizes,
    waits,
)

Experiment = Callable[[Path], bool]

EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {
    "checkpoint-rng": (results.checkpointed_gradients, results.reentrant_checkpoint, results.checkpointed_trainer),
    "non-blocking": (results.read_too_soon,),
    "non-contiguous": (
        results.transposed_loop,
        results.transposed_trainer,
        results.transposed_accelerator,
        results.lightning_loop,
    ),
    "lstm-dropout": (results.stacked_lstm, results.numeric_lstm),
    "huge-embedding": (results.huge_table, results.frozen_table),
    "mixed-dtypes": (results.float32_norms, results.frozen_float32_norms),
    "large-k": (
        products.below_a_vocabulary,
        products.of_a_large_batch,
        products.of_a_wide_layer,
        products.in_every_form,
        products.in_half_precision,
    ),
    "sliced-products": (products.into_slices, products.between_columns),
    "expanded-operands": (products.of_a_sums_gradient, products.of_expanded_matrices),
    "linear-shapes": (shapes.weight_of_one_dimension, shapes.five_dimensions),
    "linear-bias": (silent.one_row, silent.one_row_in_each, silent.many_matrices),
    "dtype-copies": (silent.half_copies, silent.views_that_widen, silent.copies_into_a_tensor),
    "index-range": (
        silent.ids_of_another_tokenizer,
        silent.labels_from_one,
        silent.labels_smoothed,
        silent.labels_in_evaluation,
        silent.ids_of_accelerate,
        silent.words_that_are_no_label,
        silent.longer_than_its_positions,
        silent.ids_of_lightning,
    ),
    "permuted-activations": (
        activations.channels_last_network,
        activations.permuted_values,
        activations.results_in_another_order,
        activations.images_through_a_resnet,
    ),
    "atomic-order": (order.embedding_gradient, order.repeated_trainer, order.resumed_trainer, order.gathered_gradient),
    "huge-products": (sizes.own_attention, sizes.products_in_every_form),
    "huge-cat": (sizes.collected_logits, sizes.cat_in_every_form),
    "embedding-grad": (sizes.tall_embedding, sizes.embedding_of_many_tokens),
    "conv-batch": (sizes.folded_batch_of_conv1d, sizes.folded_batch_of_conv2d, sizes.folded_batch_of_transposed),
    "conv3d-layout": (sizes.video_patches, sizes.transposed_volumes),
    "large-pad": (sizes.causal_padding_of_a_video, sizes.volumes_padded_by_their_edges),
    "adaptive-max-pool": (sizes.maxima_of_uneven_windows,),
    "lerp-weight": (sizes.a_beta_in_a_tensor, sizes.a_beta_of_a_schedule),
    "lone-scans": (sizes.scans_of_a_batch_of_one, sizes.extremes_of_transposed_columns),
    "index-add-gaps": (sizes.sums_in_transposed_rows, sizes.sums_in_a_slice),
    "resume-rng": (resumed.resumed_trainer, resumed.resumed_accelerator),
    "lightning-rng": (resumed.resumed_lightning, resumed.resumed_lightning_epoch),
    "resume-names": (resumed.resumed_images, resumed.best_images),
    "resume-end": (resumed.resumed_last_step, resumed.resumed_early_stop),
    "resume-batches": (resume_loops.masked_trainer, resume_loops.shuffled_accelerator),
    "resume-loss": (resumed.resumed_log,),
    "resume-epoch": (resumed.rest_of_an_epoch, resume_loops.seeded_accelerator),
    "torn-checkpoint": (resumed.torn_checkpoint,),
    "atomic-checkpoint": (resumed.broken_off,),
    "node-weights": (several.weights_on_each_node,),
    "memory-budget": (memory.near_the_recommended_maximum, memory.near_it_in_a_plain_loop),
    "memory-metrics": (memory.memory_metrics,),
    "shape-growth": (memory.many_shapes, memory.many_shapes_in_a_plain_loop),
    "oom-text": (memory.executable_batch_size, memory.executable_batch_size_of_one_buffer, memory.lightning_batch_size),
    "fork-workers": (failures.workers_of_trainer, failures.workers_of_an_evaluation),
    "half-precision": (failures.fp16_trainer, failures.fp16_accelerator),
    "cuda-words": (silent.float32_island, silent.float32_function, silent.float32_of_old),
    "cuda-optimizer": (failures.paged_optimizer,),
    "one-device": (failures.several_processes, failures.processes_of_a_notebook),
    "compile": (failures.compiled_accelerator, failures.compiled_trainer),
    "cuda-graphs": (failures.deep_in_half_precision, failures.deep_by_an_option),
    "async-loading": (failures.converted_checkpoint,),
    "attention": (failures.flash_attention, failures.flex_attention),
    "float64-columns": (failures.float64_trainer, failures.float64_accelerator, failures.float64_lightning),
    "nan-hidden": (failures.shown_loss,),
    "pin-memory": (failures.quiet_loaders,),
    "process-group": (several.by_default, several.by_gloo_s_name),
    "batch-waits": (waits.batches_of_trainer, waits.batches_of_accelerate, waits.batches_of_lightning),
}
