"""What runs when, with weights of which age: schedule.py is the contract, then one file per schedule."""
