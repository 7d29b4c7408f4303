"""What self-written texts begin with, so that they are about many things."""

# system prompts of chat models, behind which a user asks something; "" is the template's own
TOPICS = (
    "",
    "You help programmers: they ask for functions in Python.",
    "You solve word problems in arithmetic, step by step.",
    "You explain how things work to curious children.",
    "You are a cook who gives recipes.",
    "You write letters and emails for people at work.",
    "You summarise texts that the user gives.",
    "You tell short stories about whatever the user names.",
    "You answer questions about history.",
    "You turn notes into JSON, CSV or tables.",
    "",
    "You find mistakes in code that the user gives.",
    "You answer questions about biology and medicine.",
    "You help travellers to plan a journey.",
    "You rewrite sentences so that they are clearer.",
    "You answer questions about geography.",
    "You explain terms of physics and chemistry.",
    "You write poems and songs.",
    "You answer questions about law and money in plain words.",
    "You write SQL queries for the tables that the user describes.",
    "",
    "You give advice about friends, family and work.",
    "You solve equations and explain each step.",
    "You play a character, and the user talks to you.",
    "You are an assistant for the shell and for Linux.",
    "You correct grammar and spelling in the user's text.",
    "You teach languages to beginners.",
    "You write texts for shops: descriptions, offers, posts.",
    "You answer questions about films, books and music.",
    "You plan training, meals and healthy habits.",
    "",
    "You write web pages in HTML, CSS and JavaScript.",
    "You give instructions for repairs and for building things.",
    "You argue for and against an opinion.",
    "You draw facts out of a text that the user gives.",
    "You help pupils with their homework.",
    "You chat about the day.",
)
# of what a user says: a small model heeds them more than a system prompt
FIRST_OF_QUESTIONS = (
    "What is", "Write a Python function that", "Summarize the following text:", "How many", "Write an email to",
    "Explain", "Rewrite this sentence", "A shop sells", "Tell me a story about", "Translate", "Why do", "List",
    "Fix the bug in this code:", "Who was", "Read the text and answer the question.", "Compare", "Give me a recipe for",
    "Solve", "Correct the grammar:", "How do I", "Convert", "Write a short poem", "Extract", "When did",
    "Here is a table:", "Hello", "What are the steps", "Calculate", "Write a SQL query", "Is it true that", "Describe",
    "Tom has", "Make this text shorter:", "What should I do", "def", "Where is", "Please help me", "Define",
    "Answer in one sentence:", "Create a",
)  # fmt: skip
# of texts of base models; "" is nothing
FIRST_WORDS = (
    "", "The", "import", "In", "", "How to", "#", "Once", "", "def", "A", "1.", "", "Dear", "{", "Question:", "",
    "When", "<", "We", "", "class", "It", "**", "", "You", "//", "For", "", "-", "What", "Abstract", "", "Chapter",
    "I", "function", "", "This", "On", "Let",
)  # fmt: skip
