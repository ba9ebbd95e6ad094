"""Train an unchanged Hugging Face classifier with dropout. Needs `pip install '.[lm]'`."""

import torch
from transformers import BertConfig, BertForSequenceClassification

import fedmuon

if __name__ == "__main__":
    shape = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = BertForSequenceClassification(shape)  # or from_pretrained("...")
    tokens = torch.randint(1, 50, (120, 8))
    data = torch.cat([tokens, torch.ones_like(tokens)], 1), tokens[:, 0] // 26  # with a mask
    task = fedmuon.Task(model, inputs={"input_ids": (8,), "attention_mask": (8,)})
    config = {"local": {"lr": 0.02}, "federation": {"clients": 4, "per-round": 2, "rounds": 3}}
    print("accuracy", fedmuon.run(config, data=data, task=task).summary["accuracy"])
