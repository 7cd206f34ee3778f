# YaRN, by block_size / L of the model that is fine-tuned; the released script warms up over 2% of the steps
rope_scaling = 'yarn'
warmup_iters = 4
