"""Names that users of transformers, timm, Lightning and accelerate type, and ours."""

from __future__ import annotations

from collections.abc import Mapping

_OURS: Mapping[str, str] = {
    **dict.fromkeys(("learning_rate", "lr", "base_lr", "initial_lr"), "train.lr"),
    **dict.fromkeys(("num_train_epochs", "epochs", "num_epochs", "max_epochs", "n_epochs"), "train.epochs"),
    **dict.fromkeys(
        ("batch_size", "per_device_train_batch_size", "train_batch_size", "global_batch_size"), "train.batch_size"
    ),
    **dict.fromkeys(("weight_decay", "wd"), "train.weight_decay"),
    **dict.fromkeys(("warmup_steps", "warmup_epochs", "warmup_proportion"), "train.warmup_ratio"),
    **dict.fromkeys(("lr_scheduler_type", "sched", "scheduler", "lr_scheduler"), "train.lr_schedule"),
    **dict.fromkeys(("optim", "opt", "optimizer_name"), "train.optimizer"),
    **dict.fromkeys(("max_grad_norm", "clip_grad", "gradient_clip_val", "grad_clip"), "train.max_grad_norm"),
    **dict.fromkeys(("smoothing", "label_smoothing_factor"), "train.label_smoothing"),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "amp", "amp_dtype", "torch_dtype"), "train.precision"),
    **dict.fromkeys(("seed", "data_seed"), "train.seed"),
    **dict.fromkeys(("layer_decay", "llrd"), "train.layer_decay"),
    **dict.fromkeys(("eval_steps", "eval_strategy", "evaluation_strategy", "val_check_interval"), "train.eval_every"),
    **dict.fromkeys(("save_steps", "save_strategy", "every_n_train_steps"), "checkpoint.every"),
    **dict.fromkeys(("save_total_limit", "checkpoint_hist", "save_top_k"), "checkpoint.keep"),
    **dict.fromkeys(("logging_steps", "log_interval", "log_every_n_steps"), "log.every"),
    **dict.fromkeys(("report_to", "wandb_mode"), "log.wandb"),
    **dict.fromkeys(("wandb_project", "project"), "log.project"),
    **dict.fromkeys(("run_name", "experiment"), "log.name"),
    **dict.fromkeys(("output_dir", "default_root_dir", "output"), "run.dir"),
    **dict.fromkeys(("resume_from_checkpoint", "resume", "ckpt_path"), "run.resume"),
    **dict.fromkeys(("overwrite_output_dir",), "run.overwrite"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
        "train.gradient_accumulation_steps",
    ),
    **dict.fromkeys(("gradient_checkpointing", "grad_checkpointing", "activation_checkpointing"), "pipe.recompute"),
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrained_model_name_or_path"), "model.name"),
    **dict.fromkeys(("max_seq_length", "max_length", "max_seq_len"), "data.max_length"),
    **dict.fromkeys(("img_size", "input_size", "image_size"), "data.image_size"),
    **dict.fromkeys(("data_dir", "dataset_dir", "train_file", "dataset_path"), "data.path"),
    **dict.fromkeys(("dataset", "dataset_name", "task_name"), "data.name"),
    **dict.fromkeys(("doc_stride",), "data.stride"),
    **dict.fromkeys(("max_train_samples", "limit_train_batches"), "data.max_train_samples"),
    **dict.fromkeys(("max_eval_samples", "limit_val_batches"), "data.max_eval_samples"),
    **dict.fromkeys(("dataloader_num_workers", "num_workers", "workers"), "data.num_workers"),
    **dict.fromkeys(("drop", "hidden_dropout_prob", "drop_rate"), "model.dropout"),
    **dict.fromkeys(("lora_r",), "model.lora.r"),
    **dict.fromkeys(("ddp_timeout",), "run.timeout"),
    **dict.fromkeys(("mixup_alpha",), "train.mixup"),
    **dict.fromkeys(("cutmix_alpha",), "train.cutmix"),
    **dict.fromkeys(("model_ema", "model_ema_decay", "ema_decay", "use_ema"), "train.ema"),
    **dict.fromkeys(("torchcompile", "torch_compile", "compile_model"), "train.compile"),
    **dict.fromkeys(("aa", "auto_augment", "randaugment"), "data.rand_augment"),
    **dict.fromkeys(("reprob", "random_erasing", "re_prob"), "data.erasing"),
    **dict.fromkeys(("optim_args", "opt_kwargs", "opt_betas", "opt_args"), "train.optimizer_options"),
    **dict.fromkeys(("lr_scheduler_kwargs", "decay_epochs", "decay_rate"), "train.lr_options"),
    **dict.fromkeys(("problem_type",), "data.label_kind"),
    **dict.fromkeys(("metric_for_best_model", "eval_metric", "monitor"), "train.best_by"),
    **dict.fromkeys(("early_stopping_patience",), "train.early_stopping"),
}


_NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(
        ("streaming", "webdataset", "wds", "iterable", "iterable_dataset"),
        "a stream has no order to freeze, cache and resume by; give files: a folder, parquet, or a hub's dataset",
    ),
}


def not_here(name: str) -> str:
    """The reason why there is nothing for what another tool calls ``name``; empty where there may be."""
    return _NOT_HERE.get(name.lower().replace("-", "_").rpartition(".")[2], "")


def ours(name: str) -> str:
    """The dotted key for what another tool calls ``name``; empty where there is none."""
    return _OURS.get(name.lower().replace("-", "_").rpartition(".")[2], "")
