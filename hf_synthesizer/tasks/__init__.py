"""What the examples of all tasks share: which model, which data, the conversion, a training with Trainer, and the metrics of
translation, language modelling, summarisation and dialogue. Needs the packages of the extra `examples`."""
