"""Suggestions for names of options, values and commands that other programs use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_OPTIONS = {
    "optimizer.learning_rate": "lr learningrate max_lr base_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.grad_clip": "clip clip_grad clip_grad_norm gradient_clip_val gradient_clipping max_grad_norm max_norm",
    "optimizer.warmup_iters": "warmup warmup_steps num_warmup_steps lr_warmup_steps warmup_iterations",
    "train.accumulation": "grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps "
    "accumulation_steps accumulate_grad_batches grad_acc_steps",
    "optimizer.min_lr": "lr_min eta_min min_learning_rate",
    "model.batch_size": "bs batchsize batch_size micro_batch_size per_device_train_batch_size device_batch_size",
    "model.block_size": "seq_len seqlen seq_length sequence_length max_seq_len max_seq_length context_len "
    "context_length n_ctx n_positions max_position_embeddings",
    "model.n_layer": "n_layers num_layers nlayers layers num_hidden_layers",
    "model.n_head": "n_heads num_heads nheads heads num_attention_heads",
    "model.n_kv_head": "n_kv_heads num_kv_heads num_key_value_heads",
    "model.n_embd": "dim d_model hidden_size n_embed embed_dim embedding_dim emb_dim",
    "model.n_hidden": "d_ff ffn_dim intermediate_size",
    "train.max_iters": "steps max_steps num_steps n_steps total_steps train_steps num_train_steps iters num_iters "
    "iterations num_iterations",
    "train.eval_interval": "eval_every eval_steps eval_freq val_check_interval",
    "train.log_interval": "log_every log_freq logging_steps log_every_n_steps",
    "train.checkpoint_interval": "save_every save_steps save_interval ckpt_interval checkpoint_every",
    "train.keep_checkpoints": "save_total_limit",
    "train.dtype": "precision mixed_precision",
    "train.activation_checkpointing": "gradient_checkpointing grad_checkpointing checkpoint_activations recompute",
    "train.resume": "resume_from resume_from_checkpoint ckpt_path",
    "train.seed": "random_seed manual_seed",
    "train.backend": "strategy",
    "hydra.run.dir": "output_dir out_dir save_dir",
    "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule",
    "tracker": "logger report_to",
    "hooks": "callbacks",
    "data": "dataset",
}
"""Options of wordrun, and names of the same thing in other programs."""
OPTIONS = {theirs: ours for ours, names in _OPTIONS.items() for theirs in names.split()}
VALUES = {"gpu": "cuda", "nvidia": "cuda", "half": "fp16", "tb": "tensorboard", "zero": "deepspeed", "tiktoken": "gpt2"}
"""Values of options under other names."""
COMMANDS = {
    "help": "wordrun --help",
    "version": "wordrun --version",
    "list": "wordrun ls",
    "log": "wordrun tail",
    "logs": "wordrun tail",
    "sample": "wordrun generate",
    "chat": "wordrun generate",
    "doctor": "launch --doctor",
    "info": "launch --info",
    "submit": "launch --submit",
}
"""Commands that wordrun does not have, and the command that does the same."""
LAUNCH = {
    **dict.fromkeys(("--ntasks", "--nproc", "-np"), "--np"),
    **dict.fromkeys(("--nnodes", "-nnodes"), "--nodes"),
    **dict.fromkeys(("--ntasks-per-node", "--tasks-per-node", "--nproc-per-node", "--nproc_per_node"), "--ppn"),
    **dict.fromkeys(("-ppn", "-npernode", "--npernode"), "--ppn"),
    **dict.fromkeys(("-f", "-machinefile", "--machinefile", "-hostfile", "-H", "-w", "--nodelist"), "--hostfile"),
    **dict.fromkeys(("-p", "--partition", "-q", "--qos"), "--queue"),
    **dict.fromkeys(("-t", "--time"), "--walltime"),
    "-A": "--account",
    "-J": "--job-name",
    "-x": "--env",
    **dict.fromkeys(("--gpus-per-node", "--gres", "-G"), "--gpus"),
}
"""Options of srun, sbatch, mpiexec and torchrun, and launch's for the same thing."""
SEVERAL = ("tracker", "profiler", "hooks", "metrics")
"""Sections in which these names mean something else."""


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean 'x'?" for the known word closest to ``word``, or an empty string."""
    import difflib  # imported here to keep launch fast

    names = list(known)
    if (meant := VALUES.get(word.lower())) in names:
        return f"; did you mean '{prefix}{meant}'?"
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f"; did you mean '{prefix}{by_lower[close[0]]}'?" if close else ""


def option(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean 'x'?" if another program or section has an option ``name``, else an empty string."""
    section, _, last = name.lower().replace("-", "_").rpartition(".")
    if section.partition(".")[0] in (*SEVERAL, "backend", "tokenizer"):
        return ""
    ours = OPTIONS.get(last, "")
    if ours in known or ours.startswith("hydra."):
        found = [ours]
    elif ours:  # another model, for example, has this option
        return where_listed(name, known)
    else:
        same = [each for each in known if each.rpartition(".")[2] == last]
        found = [each for each in same if each.partition(".")[0] not in SEVERAL][:3]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def where_listed(name: str, known: Sequence[str]) -> str:
    """Return a message's words with the command that lists the options in the section of ``name``."""
    section = name.partition(".")[0]
    return f"; wordrun --help {section if f'{section}.' in ' '.join(known) else ''}".rstrip() + " lists the options"


def command(words: Sequence[str]) -> str:
    """Return what to write instead of ``wordrun WORDS``; empty: the first word stands for no command."""
    word, *others = words
    if word == "resume":
        return ": to resume a run, repeat its command with train.resume=outputs/latest"
    if word == "launch":
        return f": it is a command of its own: write {' '.join(['launch', *(others or ['--help'])])}"
    return f": write {' '.join([COMMANDS[word], *others])}" if word in COMMANDS else ""
