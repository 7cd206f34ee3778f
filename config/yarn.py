# YaRN, by block_size / L of the model that is fine-tuned
rope_scaling = 'yarn'
warmup_iters = 0.02          # of the steps, as in the released script
