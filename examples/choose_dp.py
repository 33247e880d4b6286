"""Choose DP parameters for five hospitals, and test that DP-SGD keeps its claim.

python examples/choose_dp.py
"""

# %% [markdown]
# # How much noise do five hospitals need?
#
# Five hospitals have 8,000 records each. They train for 30 rounds. In each round, every hospital
# trains for one epoch with batches of 64. The target is epsilon 3 for one record.

# %%
import leakfrontier as lf

advice = lf.advise(
    epsilon=3, clients=5, examples_per_client=8000, batch_size=64, rounds=30, local_epochs=1
)
print("Noise multiplier:", advice.recommended.noise_multiplier)
print(*advice.reasons, *advice.warnings, sep="\n")

# %% [markdown]
# The answer holds for correct noise. An audit tests the implementation: here our DP-SGD, at the
# recommended noise multiplier. An audit can refute a claim. It never proves one.

# %%
findings = lf.audit(lf.defenses.DPSGD(noise_multiplier=0.97), steps=100, sample_rate=0.05)
print(findings)
print("refuted" if findings.refuted else "not refuted")
