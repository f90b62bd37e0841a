"""Pictures for print, by matplotlib: who has what, the loss around models, who worked when."""
