# position interpolation, by block_size / L of the model that is fine-tuned
rope_scaling = 'pi'
