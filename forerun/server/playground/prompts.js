// Ready prompts. `about` says what can be known before a run: how much of the answer is in the prompt. What that is worth
// depends on the drafter and is measured (`Form.measured`). `exact`: the answer is in the prompt, so where a model's
// authors recommend no sampling its most likely text is the one to ask for.

const CODE = `def total_price(rows):
    x = 0
    seen = set()
    for row in rows:
        name = row['name'].strip()
        if name in seen:
            continue
        seen.add(name)
        price = float(row['price'])
        count = int(row['count'])
        x = x + price * count
    if not seen:
        return None
    print(len(seen), 'rows')
    return round(x, 2)`;

const PEOPLE = `Anna Berg is 31 years old and lives in Oslo. Tom Reed is 45 years old and lives in Leeds.
Mia Wolf is 27 years old and lives in Vienna. Jon Park is 52 years old and lives in Seoul.`;

const PERSON = '{"name": "Anna Berg", "age": 31, "city": "Oslo"}';

const LIGHTHOUSE = `The lighthouse at Cape Morn was built in 1871 after three ships were lost on the reef in a single winter. \
Its lamp burned whale oil at first, then paraffin, and it was given an electric lamp in 1923. The last keeper left in 1988, \
when the light was made automatic. Today the tower is a small museum, and volunteers open it to visitors on summer weekends.`;

const MUCH = "most of the answer is in the prompt";
const SOME = "some of the answer is in the prompt";
const NOTHING = "nothing of the answer is in the prompt";

const CHAT = [
  {
    name: "Rename a variable",
    about: MUCH,
    exact: true,
    text: `Rename the variable x to total in this function. Repeat all other lines as they are.\n\n\`\`\`python\n${CODE}\n\`\`\``,
  },
  {
    name: "Text to JSON",
    about: SOME,
    exact: true,
    text: `Turn this text into JSON. Write one object for each person, such as ${PERSON}.\n\n${PEOPLE}`,
  },
  { name: "Summarise", about: SOME, exact: true, text: `Summarise this paragraph in two sentences.\n\n${LIGHTHOUSE}` },
  { name: "Write a poem", about: NOTHING, text: "Write a poem about the sea at night." },
  { name: "Free question", about: NOTHING, text: "What makes a good holiday?" },
];

const TEXT = [
  {
    name: "Rename a variable",
    about: MUCH,
    exact: true,
    text: `${CODE}\n\n\n# The same function, with x renamed to total:\n\n\ndef total_price(rows):`,
  },
  {
    name: "Repetitive code",
    about: MUCH,
    exact: true,
    text: "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n    parser.add_argument('--name',",
  },
  {
    name: "Text to JSON",
    about: MUCH,
    exact: true,
    text: `${PEOPLE}\n\nThe same as JSON:\n\n[\n  ${PERSON},\n`,
  },
  { name: "A poem", about: NOTHING, text: "The sea at night\n\nA poem\n\n" },
  { name: "A story", about: NOTHING, text: "Nobody in the village remembered who had built the bridge, but" },
];

/** The ready prompts for a model that chats, or one that continues texts. */
export const readyPrompts = (chat) => (chat ? CHAT : TEXT);
