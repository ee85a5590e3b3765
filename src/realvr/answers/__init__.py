"""What an answer is and whether it is right: parsing, named extraction policies, the judge. No torch."""
