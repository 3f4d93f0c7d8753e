"""Experiments on magicjax: data, training of the bundled models, launcher, reports."""
